"""Control groups: a candidate's memory and processes bounded by the kernel, and all of it ended at once.

Versions 1 and 2, and hosts that mount both. A fork server makes one group below the fleet's own in each
hierarchy where it may, and in those a group for each candidate. It holds a lock on its groups, so that those of a
fork server that was killed can be told, and go when the next one starts. Where nothing may be written there
are no groups, and the fork server watches memory instead.
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
from functools import cache
from pathlib import Path
from typing import Final
from uuid import uuid4

_PREFIX: Final = "kqueue-"
_DIGITS: Final = 12
_V1: Final = ("memory", "pids")
#: How long a group may take to empty once all in it were killed, in seconds.
_EMPTY_S: Final = 1.0
_UNLIMITED: Final = 1 << 60
MEASURES: Final = ("cgroup_memory", "cgroup_processes", "cgroup_kill")


@dataclass(frozen=True, slots=True)
class _Hierarchy:
    """A place where groups may be made: ``kind`` is ``v2``, or version 1's ``memory`` or ``pids``."""

    kind: str
    directory: Path
    top: Path


class Group:
    """One candidate's group: a directory in each hierarchy."""

    def __init__(self, places: list[_Hierarchy], name: str, memory_bytes: int, processes: int) -> None:
        """Make it, empty.

        Raises:
            OSError: the kernel refuses.
        """
        self._places = [_Hierarchy(place.kind, place.directory / name, place.top) for place in places]
        try:
            for place in self._places:
                place.directory.mkdir()
                _bound(place, memory_bytes, processes)
        except OSError:
            self.remove()
            raise

    def join(self) -> None:
        """Put the calling process into it, and so all that comes of it."""
        for place in self._places:
            (place.directory / "cgroup.procs").write_text("0")

    def out_of_memory(self) -> bool:
        """Whether the kernel has ended something in it for want of memory."""
        for place in self._places:
            name = {"v2": "memory.events", "memory": "memory.oom_control"}.get(place.kind)
            if name is None:
                continue
            with contextlib.suppress(OSError):
                for line in (place.directory / name).read_text().splitlines():
                    if line.startswith("oom_kill ") and int(line.split()[1]):
                        return True
        return False

    def kill(self) -> None:
        """Kill everything in it."""
        for place in self._places:
            _kill(place.directory)

    def remove(self) -> None:
        """Remove it once it is empty, within a bounded time; what cannot be removed goes with the fork server's."""
        deadline = time.monotonic() + _EMPTY_S
        for place in self._places:
            while not _removed(place.directory) and time.monotonic() < deadline:
                _kill(place.directory)
                time.sleep(0.001)


class Groups:
    """A fork server's own groups."""

    def __init__(self) -> None:
        """Make them where the host allows it; ``measures`` says for each measure True or why not."""
        self._locks: list[int] = []
        self._places: list[_Hierarchy] = []
        self.measures: dict[str, bool | str] = dict.fromkeys(MEASURES, "no cgroup hierarchy is mounted here")
        self._count = 0
        for place in _own():
            try:
                self._open(place)
            except OSError as error:
                self._note(place, f"{place.directory} may not be written: {error.strerror}")
        if self._places:
            try:
                trial = self.group(64 << 20, 16)
                assert trial is not None
                trial.remove()
            except OSError as error:
                self.close()
                self.measures = dict.fromkeys(MEASURES, f"a group could not be bounded: {error}")

    def group(self, memory_bytes: int, processes: int) -> Group | None:
        """A group for a candidate; None where there are none.

        Raises:
            OSError: the kernel refuses.
        """
        if not self._places:
            return None
        self._count += 1
        return Group(self._places, str(self._count), memory_bytes, processes)

    def close(self) -> None:
        """Remove all of them, and end what is in them."""
        for place in self._places:
            _clear(place.directory)
        for lock in self._locks:
            os.close(lock)
        self._places, self._locks = [], []

    def _open(self, place: _Hierarchy) -> None:
        _remove_stale(place.top)
        if place.kind == "v2":
            _divide(place.directory)
        directory, lock = _make_locked(place.directory)
        self._locks.append(lock)
        own = _Hierarchy(place.kind, directory, place.top)
        if place.kind == "v2":
            self._measure("cgroup_kill", (directory / "cgroup.kill").exists(), "the kernel has no cgroup.kill")
            _divide(directory)
            shared = (directory / "cgroup.subtree_control").read_text().split()
            why = f"{place.directory} does not share its controllers: other processes live in it"
            if "memory" in shared or not self._has("cgroup_memory"):
                self._measure("cgroup_memory", "memory" in shared, why)
            if "pids" in shared or not self._has("cgroup_processes"):
                self._measure("cgroup_processes", "pids" in shared, why)
        else:
            self._measure("cgroup_memory" if place.kind == "memory" else "cgroup_processes", True, "")
            if not self._has("cgroup_kill"):  # all are listed, and killed one by one until none is left
                self._measure("cgroup_kill", True, "")
        self._places.append(own)

    def _note(self, place: _Hierarchy, why: str) -> None:
        for name in {"memory": MEASURES[:1], "pids": MEASURES[1:2], "v2": MEASURES}[place.kind]:
            if not self._has(name):
                self.measures[name] = why

    def _has(self, name: str) -> bool:
        return self.measures[name] is True

    def _measure(self, name: str, there: bool, why: str) -> None:
        self.measures[name] = True if there else why


def clean() -> None:
    """End and remove what killed fork servers left. For the supervisor, at its end."""
    for place in _own():
        _remove_stale(place.top)


def memory() -> tuple[int, int]:
    """Bytes that this process's groups still allow, caches that can be dropped counted as free, and their limit.

    Of nested limits the one that is nearest counts; (0, 0) where there is none.
    """
    found: list[tuple[int, int]] = []
    for place in _own_once():
        limit, usage, cache = {
            "v2": ("memory.max", "memory.current", "inactive_file"),
            "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        }.get(place.kind, ("", "", ""))
        for group in (place.directory, *place.directory.parents):
            if not limit or not group.is_relative_to(place.top):
                break
            with contextlib.suppress(OSError, ValueError):
                most = int((group / limit).read_text())
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                found.append((most - int((group / usage).read_text()) + int(stat[cache]), most))
    # Version 1 writes "no limit" as the largest number that it has.
    return min((room for room in found if room[1] < _UNLIMITED), default=(0, 0))


def _remove_stale(top: Path) -> None:
    """End and remove what fork servers left that are gone, wherever in a hierarchy they ran; the lock tells."""
    for group in list(top.rglob(_PREFIX + "?" * _DIGITS)):
        with contextlib.suppress(OSError):
            lock = os.open(group, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _clear(group)
            finally:
                os.close(lock)


def _own() -> Iterator[_Hierarchy]:
    """The groups that this process is in, in each hierarchy that can be used."""
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
        found = {"cgroup2": {"v2"}, "cgroup": set(options.split(","))}.get(kind, set()) & {"v2", *_V1}
        for name in sorted(found.intersection(paths)):
            path = paths[name]
            # A container without a namespace for groups is shown its own as the root.
            inner = path[len(root) :] if root != "/" and path.startswith(root) else path
            directory = Path(point, inner.lstrip("/"))
            if (directory / "cgroup.procs").exists():
                yield _Hierarchy(name, directory, Path(point))


@cache
def _own_once() -> list[_Hierarchy]:
    """The same, for who asks every second."""
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
        if directory.exists():  # else another fork server took it for one that was left
            return directory, lock
        os.close(lock)


def _divide(directory: Path) -> None:
    """Have a group of version 2 share its controllers with those below it, as far as it may."""
    for name in ("memory", "pids"):
        with contextlib.suppress(OSError):
            (directory / "cgroup.subtree_control").write_text(f"+{name}")


def _bound(place: _Hierarchy, memory_bytes: int, processes: int) -> None:
    limits = {
        "v2": {
            "memory.max": memory_bytes,
            "memory.swap.max": 0,
            "memory.oom.group": 1,
            "pids.max": processes,
        },
        "memory": {"memory.limit_in_bytes": memory_bytes, "memory.memsw.limit_in_bytes": memory_bytes},
        "pids": {"pids.max": processes},
    }[place.kind]
    for name, value in limits.items():
        if (place.directory / name).exists():
            (place.directory / name).write_text(str(value))


def _kill(directory: Path) -> None:
    try:
        (directory / "cgroup.kill").write_text("1")
        return
    except OSError:
        pass
    with contextlib.suppress(OSError):
        for pid in (directory / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)


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
    """Kill all in a group and the groups below it, and remove them."""
    deadline = time.monotonic() + _EMPTY_S
    below = [path for path in directory.iterdir() if path.is_dir()] if directory.is_dir() else []
    for group in (*below, directory):
        while not _removed(group) and time.monotonic() < deadline:
            _kill(group)
            time.sleep(0.001)
