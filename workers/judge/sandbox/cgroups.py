"""Control groups, with which Linux limits a candidate's memory and processes and kills all processes at once.

Versions 1 and 2 work, also on hosts that mount both. In each writable hierarchy, a fork server creates one group under
the fleet's own, and in it a group for each candidate. It holds a lock on its groups. So the next fork server recognises
and removes the groups of a killed one, whose locks are free. If no hierarchy is writable there are no groups, and the
fork server watches memory itself.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from pathlib import Path
from typing import Final
from uuid import uuid4

from workers.judge.host import linux

_PREFIX: Final = "kqueue-"
_DIGITS: Final = 12
_V1: Final = ("memory", "pids")
#: Time in seconds to wait for a group to become empty after its processes were killed.
_EMPTY_S: Final = 1.0
_UNLIMITED: Final = 1 << 60
#: Maximum size in bytes of one charge to a group. A group that reached its limit had less than this left.
_HUGE_PAGE: Final = 2 << 20
MEASURES: Final = ("cgroup_memory", "cgroup_processes", "cgroup_kill")


@dataclass(frozen=True, slots=True)
class _Hierarchy:
    """A cgroup directory, and the root of its hierarchy. ``kind`` is ``v2``, or version 1's ``memory`` or ``pids``."""

    kind: str
    directory: Path
    top: Path


class Lack(Enum):
    """The cause of a lack of memory when the out-of-memory killer ended a process of a group."""

    OWN = auto()
    """The group reached its own limit."""
    OTHERS = auto()
    """The group was below its limit. The host, or a group around this one, had no memory left."""


class Group:
    """One candidate's group: a directory in each hierarchy."""

    def __init__(self, places: list[_Hierarchy], name: str, memory_bytes: int, processes: int) -> None:
        """Create an empty group in each directory of ``places``. Raise OSError if Linux rejects it or a limit."""
        self._places = [_Hierarchy(hierarchy.kind, hierarchy.directory / name, hierarchy.top) for hierarchy in places]
        try:
            for hierarchy in self._places:
                hierarchy.directory.mkdir()
                _bound(hierarchy, memory_bytes, processes)
        except OSError:
            self.remove()
            raise

    def join(self) -> None:
        """Move the calling process into the group. Its future children belong to it too."""
        for hierarchy in self._places:
            (hierarchy.directory / "cgroup.procs").write_text("0")

    def out_of_memory(self) -> Lack | None:
        """Return the cause of a kill by the out-of-memory killer in the group, or None if there was no kill.

        Linux counts every such kill, including kills for a lack of memory on the host or in an outer group. So the
        group's own limit must have been reached too.
        """
        for hierarchy in self._places:
            if hierarchy.kind == "pids":
                continue
            events = _numbers(
                hierarchy.directory / ("memory.events" if hierarchy.kind == "v2" else "memory.oom_control")
            )
            if not events.get("oom_kill"):
                continue
            if hierarchy.kind == "v2":
                reached = events.get("oom", 0) > 0
            else:
                # Version 1 has no such counter. Clean file caches also count as usage.
                most = int((hierarchy.directory / "memory.max_usage_in_bytes").read_text())
                reached = most + _HUGE_PAGE >= int((hierarchy.directory / "memory.limit_in_bytes").read_text())
            return Lack.OWN if reached else Lack.OTHERS
        return None

    def cpu_seconds(self) -> float | None:
        """Return the CPU time in seconds of all processes that were ever in the group, or None without version 2."""
        for hierarchy in self._places:
            used = _numbers(hierarchy.directory / "cpu.stat").get("usage_usec") if hierarchy.kind == "v2" else None
            if used is not None:
                return used / 1e6
        return None

    def kill(self) -> bool:
        """Kill every process in the group. Return whether Linux killed all at once, so that no fork escaped."""
        at_once = [_kill(hierarchy.directory) for hierarchy in self._places]
        return any(at_once)

    def remove(self) -> None:
        """Remove the group once it is empty. If that takes too long, :meth:`Groups.close` removes it later."""
        deadline = time.monotonic() + _EMPTY_S
        for hierarchy in self._places:
            while not _removed(hierarchy.directory) and time.monotonic() < deadline:
                _kill(hierarchy.directory)
                time.sleep(0.001)


class Groups:
    """The groups of one fork server."""

    def __init__(self) -> None:
        """Create the groups if possible. ``measures`` has for each measure True, or the reason for its absence."""
        self._locks: list[int] = []
        self._places: list[_Hierarchy] = []
        self.measures: dict[str, bool | str] = dict.fromkeys(MEASURES, "no cgroup hierarchy is mounted here")
        self._count = 0
        for hierarchy in _own():
            try:
                self._open(hierarchy)
            except OSError as error:
                self._note(hierarchy, f"{hierarchy.directory} cannot be written: {error.strerror}")
        if self._places:
            try:
                group = self.group(64 << 20, 16)
                assert group is not None
                group.remove()
            except OSError as error:
                self.close()
                self.measures = dict.fromkeys(MEASURES, f"a group could not be limited: {error}")

    def group(self, memory_bytes: int, processes: int) -> Group | None:
        """Create a group for a candidate, like :class:`Group`. Return None if the host permits no groups."""
        if not self._places:
            return None
        self._count += 1
        return Group(self._places, str(self._count), memory_bytes, processes)

    def close(self) -> None:
        """Kill every process in the groups, and remove them."""
        for hierarchy in self._places:
            _clear(hierarchy.directory)
        for lock in self._locks:
            os.close(lock)
        self._places, self._locks = [], []

    def _open(self, hierarchy: _Hierarchy) -> None:
        _remove_stale(hierarchy.top)
        if hierarchy.kind == "v2":
            _divide(hierarchy.directory)
        directory, lock = _make_locked(hierarchy.directory)
        self._locks.append(lock)
        own = _Hierarchy(hierarchy.kind, directory, hierarchy.top)
        if hierarchy.kind == "v2":
            has_kill = (directory / "cgroup.kill").exists()
            self.measures["cgroup_kill"] = has_kill or "the kernel has no cgroup.kill"
            _divide(directory)
            shared = (directory / "cgroup.subtree_control").read_text().split()
            reason = f"{hierarchy.directory} does not share its controllers: other processes live in it"
            if "memory" in shared or not self._has("cgroup_memory"):
                self.measures["cgroup_memory"] = "memory" in shared or reason
            if "pids" in shared or not self._has("cgroup_processes"):
                self.measures["cgroup_processes"] = "pids" in shared or reason
        else:
            self.measures["cgroup_memory" if hierarchy.kind == "memory" else "cgroup_processes"] = True
            self.measures["cgroup_kill"] = True  # in version 1, processes are listed and killed until none is left
        self._places.append(own)

    def _note(self, hierarchy: _Hierarchy, reason: str) -> None:
        for name in {"memory": MEASURES[:1], "pids": MEASURES[1:2], "v2": MEASURES}[hierarchy.kind]:
            if not self._has(name):
                self.measures[name] = reason

    def _has(self, name: str) -> bool:
        return self.measures[name] is True


def clean() -> None:
    """Remove the groups of killed fork servers, and kill the processes in them."""
    for hierarchy in _own():
        _remove_stale(hierarchy.top)


def memory() -> tuple[int, int]:
    """Return the free bytes in this process's groups, and their limit.

    Droppable caches count as free. Among nested limits, the one with the least free memory counts. (0, 0) means no
    limit.
    """
    limits: list[tuple[int, int]] = []
    for hierarchy in _own_once():
        limit, usage, cache = {
            "v2": ("memory.max", "memory.current", "inactive_file"),
            "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        }.get(hierarchy.kind, ("", "", ""))
        for group in (hierarchy.directory, *hierarchy.directory.parents):
            if not limit or not group.is_relative_to(hierarchy.top):
                break
            with contextlib.suppress(OSError, ValueError):
                most = int((group / limit).read_text())
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                limits.append((most - int((group / usage).read_text()) + int(stat[cache]), most))
    # Version 1 writes "no limit" as its largest number.
    return min((pair for pair in limits if pair[1] < _UNLIMITED), default=(0, 0))


def _remove_stale(top: Path) -> None:
    """Remove the groups of dead fork servers, whose locks are free, anywhere in a hierarchy."""
    for group in list(top.rglob(_PREFIX + "?" * _DIGITS)):
        with contextlib.suppress(OSError):
            lock = os.open(group, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _clear(group)
            finally:
                os.close(lock)


def _own() -> Iterator[_Hierarchy]:
    """Yield this process's group in each usable hierarchy."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    paths: dict[str, str] = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(",") if controllers else ["v2"], path)
    for mount in mounts:
        before, _, after = mount.partition(" - ")
        root, point = before.split()[3:5]
        kind, _, options = after.split()
        names = {"cgroup2": {"v2"}, "cgroup": set(options.split(","))}.get(kind, set()) & {"v2", *_V1}
        for name in sorted(names.intersection(paths)):
            path = paths[name]
            # Without a cgroup namespace, a container's mount has the container's own group as its root.
            inner = path[len(root) :] if root != "/" and path.startswith(root) else path
            directory = Path(point, inner.lstrip("/"))
            if (directory / "cgroup.procs").exists():
                yield _Hierarchy(name, directory, Path(point))


@cache
def _own_once() -> list[_Hierarchy]:
    """Return the groups of :func:`_own`, cached because the supervisor needs them every second."""
    return list(_own())


def _make_locked(parent: Path) -> tuple[Path, int]:
    while True:
        directory = parent / f"{_PREFIX}{uuid4().hex[:_DIGITS]}"
        directory.mkdir()
        try:
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except FileNotFoundError:
            continue
        if directory.exists():  # another fork server can remove it as stale before the lock
            return directory, lock
        os.close(lock)


def _divide(directory: Path) -> None:
    """Delegate a version 2 group's controllers to its children, as far as the host permits."""
    for name in ("memory", "pids"):
        with contextlib.suppress(OSError):
            (directory / "cgroup.subtree_control").write_text(f"+{name}")


def _bound(hierarchy: _Hierarchy, memory_bytes: int, processes: int) -> None:
    limits = {
        "v2": {"memory.max": memory_bytes, "memory.swap.max": 0, "memory.oom.group": 1, "pids.max": processes},
        "memory": {"memory.limit_in_bytes": memory_bytes, "memory.memsw.limit_in_bytes": memory_bytes},
        "pids": {"pids.max": processes},
    }[hierarchy.kind]
    for name, value in limits.items():
        if (hierarchy.directory / name).exists():
            (hierarchy.directory / name).write_text(str(value))


def _numbers(file: Path) -> dict[str, int]:
    """Return the numbers in a file by name, or an empty dict if the file does not exist."""
    try:
        return {name: int(number) for name, number in map(str.split, linux.read(str(file)).splitlines())}
    except OSError:
        return {}


def _kill(directory: Path) -> bool:
    """Kill every process in a group. Return whether Linux did it at once."""
    with contextlib.suppress(OSError):
        (directory / "cgroup.kill").write_text("1")
        return True
    with contextlib.suppress(OSError):
        for pid in (directory / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)
    return False


def _removed(directory: Path) -> bool:
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


def _clear(directory: Path) -> None:
    """Kill every process in a group and its children, and remove the groups."""
    deadline = time.monotonic() + _EMPTY_S
    below = [path for path in directory.iterdir() if path.is_dir()] if directory.is_dir() else []
    for group in (*below, directory):
        while not _removed(group) and time.monotonic() < deadline:
            _kill(group)
            time.sleep(0.001)
