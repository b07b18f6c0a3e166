"""The inputs of a build other than its source: compilers, torch, headers, the host's processor, the builder itself.

Two hosts with the same fingerprint can use each other's builds. Anything that is not known to be the same changes the
fingerprint, which costs only a build.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

#: Files of the builder, whose contents replace a version number.
_BUILDER: Final = (
    *("judge/candidate/archive.py", "judge/candidate/headers.py", "judge/candidate/libraries.py"),
    *("judge/candidate/harness.py", "judge/candidate/failures.py"),
    *("judge/pipeline/build.py", "judge/host/artifacts.py", "judge/host/toolchain.py"),
)
#: Variables of the builder's environment that differ between slots but do not change a library.
_INCIDENTAL: Final = frozenset(
    (
        *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"),
        *("TMPDIR", "TZ", "MAX_JOBS", "KQUEUE_PRELOAD"),
    )
)
#: Databases of the system's packages, which change with every library and header that is installed from a package.
_PACKAGES: Final = ("/var/lib/dpkg/status", "/var/lib/rpm/rpmdb.sqlite", "/lib/apk/db/installed", "/etc/os-release")
#: Folders of headers that belong to no package. The folders in the compilers' variables are added.
_HEADERS: Final = ("/usr/local/include",)
_HEADER_VARIABLES: Final = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")
#: Programs that call compilers.
_TOOLS: Final = ("ninja", "make", "cmake", "ccache")
#: Maximum number of headers, and time limit in seconds for a compiler's ``--version``.
_MOST_HEADERS: Final = 50_000
_VERSION_S: Final = 20.0


def program(name: str) -> str | None:
    """Return the path of a program of the CUDA toolkit or None, with the search order of torch's extension builder."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = ([f"{home}/bin/{name}"] if home else []) + [name, f"/usr/local/cuda/bin/{name}"]
    return next((path for name in candidates if (path := shutil.which(name))), None)


def fingerprint(environment: Mapping[str, str]) -> str:
    """Return a hash of this host's tools and the sealed processes' environment variables, in up to a second."""
    facts: dict[str, Any] = {
        "python": [sys.version, sysconfig.get_config_var("SOABI"), platform.machine(), *platform.libc_ver()],
        "builder": [_hash(Path(__file__).parents[2] / name) for name in _BUILDER],
        "torch": _torch(),
        "compilers": list(_compilers(environment)),
        "toolkit": _toolkit(environment),
        "processor": _processor(),
        "environment": sorted((name, value) for name, value in environment.items() if name not in _INCIDENTAL),
        "distributions": sorted({f"{entry.name} {entry.version}" for entry in importlib.metadata.distributions()}),
        "packages": [_digest(Path(path)) for path in _PACKAGES],
        "headers": list(_headers(environment)),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _torch() -> str:
    """Return a hash of torch's version, build and CUDA version without an import of torch."""
    spec = importlib.util.find_spec("torch")
    return _digest(Path(spec.origin).with_name("version.py")) if spec is not None and spec.origin else ""


def _compilers(environment: Mapping[str, str]) -> Iterator[list[str]]:
    """Yield the name, path and version output of each program that a build uses."""
    path = environment.get("PATH", os.defpath)
    for name in (environment.get("CXX", "c++"), environment.get("CC", "cc"), "nvcc", "ld", "as", *_TOOLS):
        executable = shutil.which(name, path=path)
        yield [name, os.path.realpath(executable), _version(executable, environment)] if executable else [name]


def _version(program: str, environment: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            [program, "--version"], env=environment, capture_output=True, timeout=_VERSION_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return repr(error)
    return (done.stdout + done.stderr).decode(errors="replace")


def _toolkit(environment: Mapping[str, str]) -> list[str]:
    """Return the path and version of each CUDA toolkit that torch's builder could use."""
    nvcc = shutil.which("nvcc", path=environment.get("PATH", os.defpath))
    named = [environment.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")]
    homes = [*named, "/usr/local/cuda", str(Path(nvcc).parent.parent) if nvcc else ""]
    return [f"{os.path.realpath(home)} {_digest(Path(home, 'version.json'))}" for home in homes if home]


def _processor() -> str:
    """Return a hash of the processor's model and features, because ``-march=native`` compiles for them."""
    text = Path("/proc/cpuinfo").read_text()
    features = re.findall(r"^(?:model name|flags|Features|CPU part|CPU implementer)\s*:.*$", text, re.MULTILINE)
    return hashlib.sha256("\n".join(sorted(set(features))).encode()).hexdigest()


def _headers(environment: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    named = [entry for name in _HEADER_VARIABLES for entry in environment.get(name, "").split(os.pathsep) if entry]
    count = 0
    for root in (*_HEADERS, *named):
        for folder, folders, files in os.walk(root):
            folders.sort()
            for name in sorted(files):
                count += 1
                if count > _MOST_HEADERS:
                    return
                path = Path(folder, name)
                with contextlib.suppress(OSError):  # its folder can be read but not entered
                    yield str(path), path.lstat().st_size


def _digest(path: Path) -> str:
    """Return the hash of a file, or an empty string if it cannot be read."""
    try:
        return _hash(path)
    except OSError:
        return ""


def _hash(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
