"""Processes below one `kqueue up`, found in /proc without asking the fleet."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from kqueue.local.process import running
from tests.waiting import proc
from workers.judge.host import linux


def words(pid: int) -> list[str]:
    """Return a process's command line. Empty if it has exited."""
    return [*filter(None, proc(pid, "cmdline").split("\0"))]


def name(pid: int) -> str:
    """Return the kernel's name of a process. Empty if it has exited."""
    return proc(pid, "comm").strip()


def born(pid: int) -> int | None:
    """Return the start time of a process in kernel ticks, which with its pid identifies it. None if it has exited."""
    stat = proc(pid, "stat")
    return int(stat.rpartition(")")[2].split()[19]) if stat else None


def living(children: Iterable[int]) -> list[int]:
    """Return the children that have not exited, and reap the others."""
    found = [pid for pid in children if running(pid)]
    for pid in set(children).difference(found):
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return found


class Family:
    """The fleet of one `kqueue up`."""

    def __init__(self, up: int) -> None:
        """Take the pid of `kqueue up`."""
        self.up = up

    def supervisor(self) -> int | None:
        """Return the process that starts workers."""
        return next((pid for pid in self._children(self.up) if "workers.fleet" in words(pid)), None)

    def workers(self) -> list[int]:
        """Return the Celery workers, one per slot."""
        supervisor = self.supervisor()
        return [pid for pid in self._children(supervisor) if "workers.start" in words(pid)] if supervisor else []

    def forkserver(self, worker: int) -> int | None:
        """Return the fork server of a worker."""
        return next((pid for pid in self._children(worker) if name(pid) == "kq-forkserver"), None)

    def judge_supervisor(self, worker: int) -> int | None:
        """Return the parent of a worker's judge."""
        return next((pid for pid in self._children(worker) if name(pid) == "kq-judge-super"), None)

    def judges(self, worker: int) -> list[int]:
        """Return a worker's judge, if it has one at present."""
        judge_supervisor = self.judge_supervisor(worker)
        return self._children(judge_supervisor) if judge_supervisor else []

    def task_processes(self, worker: int) -> list[int]:
        """Return a worker's task processes, busy or idle."""
        return [pid for pid in self._children(worker) if "workers.start" in words(pid) and name(pid)[:3] != "kq-"]

    def postgres(self) -> int | None:
        """Return Postgres' parent process."""
        return self._service("postgres")

    def valkey(self) -> int | None:
        """Return the process of Valkey."""
        return self._service("valkey-server")

    def _service(self, program: str) -> int | None:
        for pid in self._children(self.up):
            # Valkey appends its address to its name.
            if Path("".join(words(pid)[:1]).partition(" ")[0]).name == program:
                return pid
        return None

    @staticmethod
    def _children(pid: int) -> list[int]:
        return [child for child in linux.children(pid) if running(child)]


def descriptors(pid: int) -> list[str]:
    """Return the targets of a process's file descriptors. Empty if it has exited."""
    try:
        return [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]  # noqa: PTH115, PTH208
    except OSError:
        return []


def own_memory(pid: int) -> int:
    """Return the private anonymous memory of a process in bytes. 0 if it has exited."""
    for line in proc(pid, "status").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0
