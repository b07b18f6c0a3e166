"""The descendants of sealed processes: count their resources, kill them, and reap them.

The fork server is the subreaper of its descendants. A process whose parent has exited becomes an orphan, which is a
child of the fork server.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from workers.judge.forkserver.files import Files
from workers.judge.forkserver.launchers import Launchers
from workers.judge.host import linux, uids
from workers.judge.sandbox.cgroups import Group, Lack

#: Seconds to wait for a sealed process's remaining child processes to exit.
_SWEEP: Final = 1.0


@dataclass(eq=False)
class ProcessTree:
    """A sealed process and all its descendants, with their uid and control group where the host separates them.

    ``reaped_s`` is the CPU time in seconds of its reaped processes, ``used_s`` the maximum observed time of the tree.
    """

    pid: int
    uid: int | None
    group: Group | None
    reaped_s: float = field(default=0.0, init=False)
    used_s: float = field(default=0.0, init=False)

    def pids(self, orphans: list[int]) -> Iterator[int]:
        """Yield the pids of the tree, including orphans of it."""
        todo = [self.pid, *self.own(orphans)]
        while todo:
            pid = todo.pop()
            yield pid
            todo += linux.children(pid)

    def own(self, orphans: list[int]) -> list[int]:
        """Return the orphans of this tree. Without separate uids per sealed process, return all orphans."""
        return orphans if self.uid is None else [pid for pid in orphans if linux.owner(pid) == self.uid]

    def cpu_seconds(self, orphans: list[int]) -> float:
        """Return the CPU time in seconds of the tree, including orphans of it.

        A control group counts all descendants. Without one, a process that is not reaped counts only while it runs.
        """
        counted = 0.0 if self.group is None else self.group.cpu_seconds() or 0.0
        living = sum(map(linux.cpu_seconds, self.pids(orphans)))
        self.used_s = max(self.used_s, counted, self.reaped_s + living)
        return self.used_s

    def reap(self, pid: int, flags: int = 0) -> int:
        """Reap a child that belongs to this tree, and return its wait status."""
        reaped, status, used = os.wait4(pid, flags)
        if reaped:
            self.reaped_s += used.ru_utime + used.ru_stime
        return status

    def out_of_memory(self) -> Lack | None:
        """Return the cause if Linux's out-of-memory killer ended a process of the group, else None."""
        return None if self.group is None else self.group.out_of_memory()


class Children:
    """The fork server's children: running sealed processes, its helpers, and orphans."""

    def __init__(self, running: Mapping[int, ProcessTree], launchers: Launchers) -> None:
        """Distinguish the children by ``running``, the sealed processes by pid, and the launchers' compilers."""
        self._running = running
        self._launchers = launchers
        self._removals: list[subprocess.Popen[bytes]] = []

    def collect_helpers(self) -> None:
        """Reap helpers that have exited. Call this when a child has exited."""
        self._launchers.look()
        self._removals = [removal for removal in self._removals if removal.poll() is None]

    def remove(self, files: Files) -> None:
        """Start the removal of a sealed process's files."""
        for directory in files.release():
            with contextlib.suppress(OSError):
                self._removals.append(linux.start_removal(directory))

    def orphans(self) -> list[int]:
        """Return the running children that are orphans of sealed processes."""
        own = self._own()
        return [pid for pid in linux.children(os.getpid()) if pid not in own and not linux.is_zombie(pid)]

    def _own(self) -> set[int]:
        """Return the children that are sealed processes or helpers of the fork server."""
        return {*self._running, *(removal.pid for removal in self._removals), *self._launchers.pids}

    def kill(self, tree: ProcessTree) -> None:
        """Kill all processes of a tree, by control group or uid, and as orphans."""
        # Killing by uid needs a fork, so it is skipped after a kill by control group. A sweep detects survivors.
        killed = tree.group is not None and tree.group.kill()
        # The process must not be reaped yet. Until then no other process group can have the same number.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(tree.pid, signal.SIGKILL)
        if tree.uid is not None and not killed:
            kill_uid(tree.uid)
        for pid in tree.own(self.orphans()):
            os.kill(pid, signal.SIGKILL)

    def sweep(self, tree: ProcessTree) -> None:
        """Kill and reap an ended tree's orphans and all processes of its uid, within a bounded time."""
        deadline = time.monotonic() + _SWEEP
        while time.monotonic() < deadline:
            own = self._own()
            for pid in [pid for pid in linux.children(os.getpid()) if pid not in own and linux.is_zombie(pid)]:
                owners = [each for each in (tree, *self._running.values()) if each.own([pid])]
                (owners or [tree])[0].reap(pid, os.WNOHANG)
            # Orphans of other running processes are not killed. They count as leftovers when those processes end.
            orphans = tree.own(self.orphans())
            for pid in orphans:
                os.kill(pid, signal.SIGKILL)
                tree.reap(pid, os.WNOHANG)
            survivors = linux.living_of_uid(tree.uid) if tree.uid is not None else []
            if tree.uid is not None and survivors:
                kill_uid(tree.uid)
            if not orphans and not survivors:
                break
            time.sleep(0.0005)
        if tree.group is not None:
            tree.used_s = max(tree.used_s, tree.group.cpu_seconds() or 0.0)
            tree.group.remove()


def has_ended(pid: int) -> bool:
    """Return whether a child has ended, without reaping it."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def await_end(pid: int, seconds: float) -> None:
    """Wait for a child's end, which is delayed until the driver has freed its GPU memory."""
    descriptor, ended = os.pidfd_open(pid), select.poll()
    try:
        ended.register(descriptor, select.POLLIN)
        ended.poll(seconds * 1000)
    finally:
        os.close(descriptor)


def kill_leftovers(uid: int | None) -> None:
    """Kill the processes that an earlier user of a slot's uid left under any uid of its sealed processes.

    Call this before large imports, because it forks for each uid, and a large process forks slowly.
    """
    for leftover in () if uid is None else uids.all_of(uid):
        kill_uid(leftover)


def kill_uid(uid: int) -> None:
    """Kill all processes of a uid at once, because a loop over pids would race with their forks."""
    try:
        pid = os.fork()
    except OSError:
        return  # without a process for this, the known processes are killed one by one
    if pid == 0:
        # Only the effective uid is the processes' uid, so this process can signal them, and they can neither signal nor
        # trace it.
        try:
            killer = uid + uids.KILLER_OFFSET
            os.setresuid(killer, uid, killer)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    deadline = time.monotonic() + _SWEEP
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.0002)
