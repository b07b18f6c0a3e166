"""What of the file system a sealed process reaches: what it runs on, its GPU, its own directory, nothing else."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from workers.judge.sandbox import landlock, view
from workers.judge.sandbox.landlock import Access, Ruleset

#: Where hosts keep programs and libraries.
_SYSTEM: Final = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt"),
    *("/nix/store", "/gnu/store", "/run/opengl-driver"),
)
#: What libraries and compilers read beside them, and no more of those directories.
_FILES: Final = (
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/nsswitch.conf"),
    *("/etc/passwd", "/etc/group", "/etc/localtime", "/etc/timezone", "/etc/os-release", "/etc/nvidia"),
    *("/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/loadavg", "/proc/uptime", "/proc/version"),
    *("/proc/devices", "/proc/filesystems", "/proc/modules", "/proc/driver", "/proc/sys"),
    *("/sys/bus", "/sys/class", "/sys/dev", "/sys/devices", "/sys/kernel/mm", "/sys/module"),
)
_NODES: Final = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
#: What all GPUs share.
_GPU_NODES: Final = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
#: A path that was only named for what lies in it opens none of these, nor what they lie in.
_PRIVATE: Final = ("/dev", "/etc", "/home", "/proc", "/root", "/run", "/sys", "/tmp", "/var")  # noqa: S108


@dataclass(frozen=True, slots=True)
class Reach:
    """Paths by what may be done with them. The candidate's own directory and its own ``/proc`` come beside.

    Attributes:
        readable: read, and run.
        nodes: devices without orders of their own (ioctl): read and written.
        gpu_nodes: those of a GPU: read, written and ordered about.
    """

    readable: tuple[str, ...]
    nodes: tuple[str, ...]
    gpu_nodes: tuple[str, ...]

    def allow(self, rules: Ruleset, scratch: str, more: tuple[str, ...] = ()) -> None:
        """Write it, what is the calling process's own, and ``more`` to be read and run, into a ruleset."""
        for path in (*self.readable, *more):
            rules.allow(path, landlock.READ_AND_RUN)
        for path in self.nodes:
            rules.allow(path, landlock.DEVICE)
        for path in self.gpu_nodes:
            rules.allow(path, landlock.DEVICE | Access.IOCTL_DEV)
        rules.allow(scratch, landlock.OWN)
        # Other processes' directories stay out of sight. The driver names threads of its own through files.
        rules.allow("/proc/self", landlock.READ)
        if self.gpu_nodes:
            rules.allow("/proc/self/task", landlock.READ | Access.WRITE_FILE | Access.TRUNCATE)


def find(visible: str | None) -> tuple[Reach, bool | str]:
    """What candidates reach whose ``CUDA_VISIBLE_DEVICES`` is ``visible``.

    Returns:
        it, and whether that is one GPU's devices only; why not otherwise.
    """
    readable = tuple(dict.fromkeys([*_SYSTEM, *map(str, _named()), *_FILES]))
    gpus, only = _gpu_nodes(visible)
    return Reach(readable, _NODES, (*_GPU_NODES, *gpus) if gpus else ()), only


def _named() -> Iterator[Path]:
    """Interpreter, packages, and where the environment says that programs and libraries are."""
    checkout = Path(__file__).parents[3]
    named = view.needed()
    for variable in ("PATH", "LD_LIBRARY_PATH"):
        entries = os.environ.get(variable, "").split(os.pathsep)
        named += [Path(entry).resolve() for entry in entries if entry.startswith("/")]
    private = {Path(path) for path in (*_PRIVATE, tempfile.gettempdir(), Path.home())}
    for path in named:
        if any(other == path or path in other.parents for other in private):
            continue
        if path == checkout and (checkout / "pyproject.toml").exists():
            # Its packages, not what else lies in a checkout.
            yield from (checkout / name for name in ("kqueue", "workers"))
        elif path.is_dir():
            yield path


def _gpu_nodes(visible: str | None) -> tuple[tuple[str, ...], bool | str]:
    if visible == "":
        return (), True
    every = tuple(str(path) for path in sorted(Path("/dev").glob("nvidia[0-9]*")))
    if visible is None:
        return every, "CUDA_VISIBLE_DEVICES names no GPU" if every else True
    minor = _minor(visible)
    if isinstance(minor, str):
        return every, minor
    return (f"/dev/nvidia{minor}",), True


def _minor(uuid: str) -> int | str:
    """The number of a GPU's device node; why it is not known otherwise.

    Asked of NVML in a child: what the library opens must not be inherited by candidates.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        answer: int | str = "no answer"
        try:
            import pynvml

            nvml: Any = pynvml
            nvml.nvmlInit()
            answer = int(nvml.nvmlDeviceGetMinorNumber(nvml.nvmlDeviceGetHandleByUUID(uuid)))
        except Exception as error:  # noqa: BLE001 -- told to the parent
            answer = f"NVML does not tell the device node of {uuid}: {error}"
        finally:
            os.write(writer, json.dumps(answer).encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        data = stream.read()
    os.waitpid(child, 0)
    return json.loads(data) if data else "NVML crashed"
