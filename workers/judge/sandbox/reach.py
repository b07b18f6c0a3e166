"""The files that a sealed process can reach: its runtime, its GPU and its own directory."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from kqueue import folders
from workers.judge.sandbox import landlock, view
from workers.judge.sandbox.landlock import Access, Ruleset

#: Directories of programs and libraries on common hosts.
_SYSTEM: Final = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt"),
    *("/nix/store", "/gnu/store", "/run/opengl-driver"),
)
#: Other files and directories that libraries and compilers read.
_FILES: Final = (
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/nsswitch.conf"),
    *("/etc/passwd", "/etc/group", "/etc/localtime", "/etc/timezone", "/etc/os-release", "/etc/nvidia"),
    *("/proc/cpuinfo", "/proc/version", "/proc/devices", "/proc/filesystems", "/proc/modules"),
)
#: Further files for a GPU's driver and NCCL. Many of them show the host's current activity.
_GPU_FILES: Final = (
    *("/proc/meminfo", "/proc/stat", "/proc/loadavg", "/proc/uptime", "/proc/driver", "/proc/sys"),
    *("/sys/bus", "/sys/class", "/sys/dev", "/sys/devices", "/sys/kernel/mm", "/sys/module"),
)
#: The part of them for processes without a GPU: files with static properties of the host. They are listed one by one,
#: because Landlock opens a whole directory or nothing.
_CPU_FILES: Final = (
    *("/proc/sys/kernel/osrelease", "/proc/sys/kernel/cap_last_cap", "/proc/sys/kernel/ngroups_max"),
    *("/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max", "/proc/sys/kernel/random/boot_id"),
    *("/proc/sys/vm/overcommit_memory", "/proc/sys/vm/max_map_count", "/proc/sys/crypto/fips_enabled"),
    *("/sys/devices/system/cpu", "/sys/devices/system/node/online", "/sys/devices/system/node/possible"),
    *("/sys/kernel/mm/transparent_hugepage/enabled", "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size"),
)
#: Directory with the host's devices, which Gloo lists.
_BUSES: Final = "/sys/bus/pci/devices"
_NODES: Final = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
#: Device nodes that all GPUs share.
_GPU_NODES: Final = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
#: Directories that are never opened because of an environment variable, and neither are their parents.
_PRIVATE: Final = ("/dev", "/etc", "/home", "/proc", "/root", "/run", "/sys", "/tmp", "/var")  # noqa: S108


@dataclass(frozen=True, slots=True)
class Reach:
    """Paths by kind of access: to read and execute, devices without ioctl, and devices of a GPU with ioctl.

    The candidate also gets its own directories and its own ``/proc`` entry.
    """

    readable: tuple[str, ...]
    nodes: tuple[str, ...]
    gpu_nodes: tuple[str, ...]

    def allow(self, rules: Ruleset, own: Sequence[str], more: Sequence[str] = ()) -> None:
        """Add these paths, the writable directories ``own``, and the readable paths ``more`` to a ruleset."""
        for path in (*self.readable, *more):
            rules.allow(path, landlock.READ_AND_RUN)
        for path in self.nodes:
            rules.allow(path, landlock.DEVICE)
        for path in self.gpu_nodes:
            rules.allow(path, landlock.DEVICE | Access.IOCTL_DEV)
        for path in own:
            rules.allow(path, landlock.OWN)
        # Only the process's own directory in /proc. The driver writes there to name its threads.
        rules.allow("/proc/self", landlock.READ)
        if self.gpu_nodes:
            rules.allow("/proc/self/task", landlock.READ | Access.WRITE_FILE | Access.TRUNCATE)


def find(visible: str | None) -> tuple[Reach, bool | str]:
    """Return the paths that candidates with this ``CUDA_VISIBLE_DEVICES`` can reach.

    The second result is True if they include the devices of at most one GPU, or else the reason.
    """
    gpus, only = _gpu_nodes(visible)
    readable = tuple(dict.fromkeys([*_SYSTEM, *map(str, _named()), *_FILES, *(_GPU_FILES if gpus else _CPU_FILES)]))
    return Reach(readable, _NODES, (*_GPU_NODES, *gpus) if gpus else ()), only


def for_group(reach: Reach, devices: Sequence[str]) -> Reach:
    """Return the reach of a process of a group that uses these GPUs together, or none."""
    nodes = dict.fromkeys(node for device in devices for node in _gpu_nodes(device)[0])
    found = {str(path.resolve()) for path in Path(_BUSES).glob("*")}
    return replace(
        reach, readable=(*reach.readable, _BUSES, *found), gpu_nodes=(*_GPU_NODES, *nodes) if nodes else reach.gpu_nodes
    )


def is_readable(path: Path) -> bool:
    """Return whether Landlock lets sealed processes read below a path."""
    target = path.resolve()
    readable = [Path(name).resolve() for name in (*_SYSTEM, *_named())]
    return any(name == target or name in target.parents for name in readable)


def _named() -> Iterator[Path]:
    """Yield the directories of the interpreter, its packages, PATH and LD_LIBRARY_PATH."""
    checkout = Path(__file__).parents[3]
    named = [*view.needed(), Path(sys.prefix)]  # The covers of a group would hide a link to it.
    for variable in ("PATH", "LD_LIBRARY_PATH"):
        entries = folders.usable(os.environ.get(variable, "")).split(os.pathsep)
        named += [Path(entry).resolve() for entry in entries if entry]
    # Path.home() fails for a uid without an entry in /etc/passwd.
    private = {Path(path) for path in (*_PRIVATE, tempfile.gettempdir(), os.path.expanduser("~"))}  # noqa: PTH111
    for path in named:
        if any(other == way or way in other.parents for way in (path, path.resolve()) for other in private):
            continue
        if path.resolve() == checkout and (checkout / "pyproject.toml").exists():
            # Of a checkout, only the packages are readable.
            yield from (checkout / name for name in ("kqueue", "workers"))
        else:
            yield path


def _gpu_nodes(visible: str | None) -> tuple[tuple[str, ...], bool | str]:
    if visible == "":
        return (), True
    every = tuple(str(path) for path in sorted(Path("/dev").glob("nvidia[0-9]*")))
    if visible is None:
        return every, "CUDA_VISIBLE_DEVICES names no GPU" if every else True
    minor = _minor(visible)
    return (every, minor) if isinstance(minor, str) else ((f"/dev/nvidia{minor}",), True)


def _minor(uuid: str) -> int | str:
    """Return the number of a GPU's device node, or the reason why it is unknown."""
    # A child calls NVML, because candidates must not inherit the descriptors that the library opens.
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        answer: int | str = "no answer"
        try:
            import pynvml

            nvml: Any = pynvml
            nvml.nvmlInit()
            answer = int(nvml.nvmlDeviceGetMinorNumber(nvml.nvmlDeviceGetHandleByUUID(uuid)))
        except Exception as error:  # noqa: BLE001 -- reported to the parent
            answer = f"NVML does not know the device node of {uuid}: {error}"
        finally:
            os.write(writer, json.dumps(answer).encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        data = stream.read()
    os.waitpid(child, 0)
    return json.loads(data) if data else "NVML crashed"
