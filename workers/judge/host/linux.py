"""Linux calls that Python's standard library lacks, and readers of ``/proc``."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from stat import S_ISREG
from typing import Any, Final, NoReturn

_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

PR_SET_PDEATHSIG: Final = 1
PR_SET_DUMPABLE: Final = 4
PR_SET_NAME: Final = 15
PR_SET_CHILD_SUBREAPER: Final = 36
PR_SET_NO_NEW_PRIVS: Final = 38

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWNET: Final = 0x40000000
MS_BIND: Final = 0x1000
MS_REC: Final = 0x4000
MS_PRIVATE: Final = 1 << 18
MS_SLAVE: Final = 1 << 19
MS_NOSUID: Final = 2
MS_NODEV: Final = 4

#: System calls for mounts by descriptor (Linux 5.2). The numbers are the same on every architecture.
_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT = 428, 429, 430, 431, 432
_CLOEXEC: Final = 1
_FSCONFIG_SET_STRING: Final = 1
_FSCONFIG_CREATE: Final = 6
_MOUNT_ATTR_NOSUID_NODEV: Final = 2 | 4
_MOVE_MOUNT_F_EMPTY_PATH: Final = 4
_OPEN_TREE_CLONE: Final = 1 | os.O_CLOEXEC
_AT_FDCWD: Final = -100

#: Parameters of glibc's ``mallopt``: free bytes that stay at the end of the heap (the largest C int), and the size in
#: bytes from which an allocation gets its own mapping (the largest value that glibc allows).
_M_TRIM_THRESHOLD, _KEPT_BYTES = -1, (1 << 31) - 1
_M_MMAP_THRESHOLD, _MAPPED_BYTES = -3, 32 << 20

#: Maximum time in seconds for which a sweep of leftover processes blocks its caller.
_SWEEP_S: Final = 0.02
#: Number of bytes of a file that are read at once.
_CHUNK_BYTES: Final = 1 << 16
#: Flag of a task in ``/proc/PID/stat``, from linux/sched.h.
_PF_EXITING: Final = 0x00000004


def _check(result: int, call: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")


def syscall(number: int, *arguments: Any) -> int:
    """Make a system call that the C library does not wrap. Integers are passed as ``long``."""
    passed = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    result = int(_libc.syscall(ctypes.c_long(number), *passed))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"system call {number}: {os.strerror(code)}")
    return result


def prctl(option: int, value: int) -> None:
    """Call ``prctl(option, value)``."""
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def die_with(parent: int) -> Callable[[], None]:
    """Return a ``preexec_fn`` for a child of ``parent``. The child dies with the thread that forked it."""

    def in_child() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return in_child


def leave(status: int) -> NoReturn:
    """Exit this forked process at once. Its output is flushed unless that fails, as on a full disk."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


def set_name(name: str) -> None:
    """Set the process's name that ``ps`` shows, cut to 15 bytes."""
    _check(_libc.prctl(PR_SET_NAME, ctypes.create_string_buffer(name.encode()[:15]), 0, 0, 0), "prctl PR_SET_NAME")


def drop_capabilities() -> None:
    """Drop every held or inheritable capability."""
    _check(_libc.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24)), "capset")


def keep_freed_memory() -> None:
    """Make this process and its children reuse memory that they free, instead of returning it to the host.

    By default glibc adapts this to earlier allocations. A process then has page faults in every call, or in none,
    depending on its past. Two processes with the same code differ by up to a third.
    """
    _libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
    _libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def give_freed_memory_back() -> None:
    """Return to the host the memory that this process freed and glibc kept."""
    _libc.malloc_trim(0)


def unshare(flags: int) -> None:
    """Move to new namespaces of the kinds in ``flags``."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def setns(descriptor: int) -> None:
    """Move to the namespace of an open file of ``/proc``."""
    _check(_libc.setns(ctypes.c_int(descriptor), 0), "setns")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Call ``mount(2)``."""

    def text(value: str | None) -> bytes | None:
        return None if value is None else os.fsencode(value)

    _check(_libc.mount(text(source), text(target), text(kind), ctypes.c_ulong(flags), text(data)), f"mount {target}")


def tmpfs(**options: object) -> int:
    """Create a detached tmpfs, which is removed with its last user. Return a descriptor of its root."""
    making = syscall(_FSOPEN, b"tmpfs", _CLOEXEC)
    try:
        for name, value in options.items():
            syscall(_FSCONFIG, making, _FSCONFIG_SET_STRING, name.encode(), str(value).encode(), 0)
        syscall(_FSCONFIG, making, _FSCONFIG_CREATE, None, None, 0)
        return syscall(_FSMOUNT, making, _CLOEXEC, _MOUNT_ATTR_NOSUID_NODEV)
    finally:
        os.close(making)


def attach(mount: int, path: str) -> None:
    """Attach a detached mount to a directory."""
    syscall(_MOVE_MOUNT, mount, b"", _AT_FDCWD, os.fsencode(path), _MOVE_MOUNT_F_EMPTY_PATH)


def clone(path: str) -> int:
    """Return a descriptor of a detached mount of a mounted directory, which shows the same files."""
    return syscall(_OPEN_TREE, _AT_FDCWD, os.fsencode(path), _OPEN_TREE_CLONE)


def read(file: str) -> str:
    """Return the content of a small file of ``/proc`` or ``/sys``, in less than half of :class:`Path`'s time."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return b"".join(iter(lambda: os.read(descriptor, _CHUNK_BYTES), b"")).decode(errors="surrogateescape")
    finally:
        os.close(descriptor)


def children(pid: int) -> list[int]:
    """Return the direct children of all threads of a process, or an empty list if it is gone."""
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for task in _names(f"/proc/{pid}/task"):
            pids += map(int, read(f"/proc/{pid}/task/{task}/children").split())
    return pids


def sweep(keep: frozenset[int] | set[int]) -> bool:
    """Kill and reap this process's direct children except ``keep``, and then their orphans.

    Return True if all are gone, and False after 20 ms, because a process that hangs in a driver does not die.
    """
    deadline = time.monotonic() + _SWEEP_S
    while leftovers := [pid for pid in children(os.getpid()) if pid not in keep]:
        for pid in leftovers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.0005)
    return True


def parent(pid: int) -> int | None:
    """Return a process's parent, or None if the process is gone or its parent is outside this pid namespace."""
    try:
        return int(read(f"/proc/{pid}/stat").rpartition(")")[2].split()[1]) or None
    except (OSError, ValueError):
        return None


def descends(pid: int, ancestor: int | None) -> bool:
    """Return whether the process is ``ancestor`` or descends from it."""
    at: int | None = pid
    while at is not None and at != ancestor:
        at = parent(at)
    return at is not None


def is_zombie(pid: int) -> bool:
    """Return whether the process is a zombie or gone."""
    try:
        stat = read(f"/proc/{pid}/stat")
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


def is_doomed(pid: int) -> bool:
    """Return whether the process was killed but still exists, because it has not died yet or was not reaped."""
    try:
        status = read(f"/proc/{pid}/status")
    except OSError:
        return False
    fields = dict(line.split(":", 1) for line in status.splitlines())
    pending = int(fields["ShdPnd"], 16) | int(fields["SigPnd"], 16)
    return bool(pending >> (signal.SIGKILL - 1) & 1) or fields["State"].split()[0] in "ZX"


def is_exiting(pid: int) -> bool:
    """Return whether all threads of the process are exiting and releasing its resources, or it is gone."""
    for task in _names(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):  # the thread is gone
            if not int(read(f"/proc/{pid}/task/{task}/stat").rpartition(")")[2].split()[6]) & _PF_EXITING:
                return False
    return True


def owner(pid: int) -> int | None:
    """Return the uid of a process, or None if it is gone."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None


def living_of_uid(uid: int) -> list[int]:
    """Return the processes of a uid, without zombies."""
    pids: list[int] = []
    for pid in filter(str.isdigit, _names("/proc")):
        with contextlib.suppress(OSError):
            text = read(f"/proc/{pid}/status")
            if f"\nUid:\t{uid}\t" in text and "\nState:\tZ" not in text and "\nState:\tX" not in text:
                pids.append(int(pid))
    return pids


def start_removal(directory: Path) -> subprocess.Popen[bytes]:
    """Start the removal of a directory that a candidate filled, in a separate process.

    The tree can be deeper than Python's recursion limit, take too long to wait for, and contain directories without
    permissions for us. Links are removed and not followed.
    """
    script = 'rm -rf -- "$1" 2>/dev/null || { chmod -R u+rwx -- "$1"; rm -rf -- "$1"; }'
    return subprocess.Popen(
        ["sh", "-c", script, "remove", str(directory)],
        stdin=subprocess.DEVNULL,
        env={"PATH": os.defpath + ":/usr/sbin:/sbin"},
        cwd="/",
    )


def unlinked_bytes(pids: Iterable[int], directory: str) -> int:
    """Return the bytes of deleted files that processes hold open on the file system of ``directory``.

    Processes that are gone or inaccessible count as holding no files.
    """
    sizes: dict[int, int] = {}
    with contextlib.suppress(OSError):
        device = os.stat(directory).st_dev  # noqa: PTH116 -- called twice a second for each process
        for pid in pids:
            for name in _names(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    held = os.stat(f"/proc/{pid}/fd/{name}")  # noqa: PTH116
                    if held.st_nlink == 0 and held.st_dev == device and S_ISREG(held.st_mode):
                        sizes[held.st_ino] = held.st_blocks * 512
    return sum(sizes.values())


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)  # noqa: PTH208
    except OSError:
        return []


def physical_bytes() -> int:
    """Return the host's memory in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    """Return the CPU time in seconds of a process and of its children that have ended, or 0 if it is gone."""
    try:
        fields = read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int | str) -> int:
    """Return a process's resident memory in bytes, private and shared, without files, or 0 if it is gone.

    ``pid`` can be ``self``.
    """
    total = 0
    try:
        for line in read(f"/proc/{pid}/status").splitlines():
            if line.startswith(("RssAnon:", "RssShmem:")):
                total += int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        return 0
    return total


def out_of_memory_kills() -> int:
    """Return the number of kills by the host's out-of-memory killer, or 0 if the host does not report it."""
    with contextlib.suppress(OSError, ValueError):
        for line in read("/proc/vmstat").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
