"""The processes below one `kqueue up`, found by what they are, without asking the fleet."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kqueue.local.process import running
from workers.judge.host import linux


def words(pid: int) -> list[str]:
    """A process's command line; empty where it is gone, or dead and not reaped."""
    with suppress(OSError):
        line = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode(errors="replace")
        return line.split("\0") if line else []
    return []


def name(pid: int) -> str:
    """What the kernel calls a process; empty where it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def below(pid: int) -> Iterator[int]:
    """All descendants of a process, those that wait to be reaped included."""
    for child in linux.children(pid):
        yield child
        yield from below(child)


def born(pid: int) -> int | None:
    """When a process began, in the kernel's ticks: with its id it names one process. None where it is gone."""
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return None


class Family:
    """The fleet of one `kqueue up`."""

    def __init__(self, up: int) -> None:
        """Name the process that owns it all."""
        self.up = up

    def supervisor(self) -> int | None:
        """The process that starts workers."""
        return next((pid for pid in self._children(self.up) if "workers.fleet" in words(pid)), None)

    def workers(self) -> list[int]:
        """The Celery workers, one a slot."""
        supervisor = self.supervisor()
        return [pid for pid in self._children(supervisor) if "workers.start" in words(pid)] if supervisor else []

    def forkserver(self, worker: int) -> int | None:
        """The fork server of a worker."""
        return next((pid for pid in self._children(worker) if name(pid) == "kq-forkserver"), None)

    def judge_supervisor(self, worker: int) -> int | None:
        """The parent of a worker's judge."""
        return next((pid for pid in self._children(worker) if name(pid) == "kq-judge-super"), None)

    def judges(self, worker: int) -> list[int]:
        """A worker's judge, if it has one at present."""
        judge_supervisor = self.judge_supervisor(worker)
        return self._children(judge_supervisor) if judge_supervisor else []

    def task_processes(self, worker: int) -> list[int]:
        """The children of a worker that see to a task, or wait for one."""
        return [pid for pid in self._children(worker) if "workers.start" in words(pid) and name(pid)[:3] != "kq-"]

    def postgres(self) -> int | None:
        """Postgres' own parent process."""
        return self._service("postgres")

    def valkey(self) -> int | None:
        """Valkey."""
        return self._service("valkey-server")

    def _service(self, program: str) -> int | None:
        for pid in self._children(self.up):
            # Valkey puts its address behind its name.
            if Path("".join(words(pid)[:1]).partition(" ")[0]).name == program:
                return pid
        return None

    @staticmethod
    def _children(pid: int) -> list[int]:
        return [child for child in linux.children(pid) if running(child)]


def descriptors(pid: int) -> list[str]:
    """What the descriptors of a process are of; empty where it is gone."""
    try:
        return [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]  # noqa: PTH115, PTH208
    except OSError:
        return []


def own_memory(pid: int) -> int:
    """The memory of a process that comes from no file and is not shared, in bytes; 0 where it is gone."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    return 0
