"""Helpers of the chaos tests: faults, and the invariants that must hold at the end."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Any, Final
from uuid import UUID

from kqueue.local.process import running
from tests.chaos.family import name, words
from tests.fleet.told import HERE, Fleet, Services
from tests.waiting import below, waits
from workers.judge.host import linux

#: Limit in seconds for any wait. It is generous because the machine can be busy.
PATIENCE_S: Final = 90.0
#: The command that stands in for a fork server in tests/fleet/judges.py.
STAND_IN: Final = ["sleep", "infinity"]


class Whole:
    """Checks the invariants of evaluations after any fault."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def __call__(self, *ids: UUID, category: str | None = "passed", attempts: int | None = None) -> list[Any]:
        """Wait for one verdict per evaluation, of this category if one is given. Then check that another evaluation
        passes, no lease is held, and no process remains.

        Returns:
            the attempts of all evaluations, in order.
        """
        services = self._services
        assert ids
        deadline = time.monotonic() + PATIENCE_S
        for identity in ids:
            verdict = services.verdict(identity, max(1.0, deadline - time.monotonic()))
            assert category in (None, verdict.category), verdict
            if attempts is not None:
                assert verdict.attempts == attempts, [tuple(a) for a in services.attempts(identity)]
        told = services.rows(
            "SELECT e.id, e.state, count(v.evaluation_id) AS verdicts FROM evaluations AS e "
            "LEFT JOIN verdicts AS v ON v.evaluation_id = e.id WHERE e.id = ANY(:ids) GROUP BY e.id",
            ids=list(ids),
        )
        assert {(row.state, row.verdicts) for row in told} == {("done", 1)}
        assert services.verdict(services.submit("ok", attempts=3), PATIENCE_S).passed
        services.until(
            lambda: not services.rows("SELECT 1 FROM attempts WHERE ended_at IS NULL"), 30, "no open attempt"
        )
        deadline = time.monotonic() + 15
        while left := {pid: (name(pid), words(pid)) for pid in strays()}:
            assert time.monotonic() < deadline, f"leftover processes: {left}"
            time.sleep(0.05)
        return [attempt for identity in ids for attempt in services.attempts(identity)]


def strays() -> list[int]:
    """Return descendants of this process's supervisors that belong to no worker's family."""
    found: list[int] = []
    for supervisor in _running(os.getpid()):
        if not {"workers.fleet", str(HERE / "run_fleet.py")} & set(words(supervisor)):
            continue
        for child in _running(supervisor):
            if _works(child):  # not a GPU health watcher or a GPU self-test
                servers = [pid for pid in _running(child) if name(pid) == "kq-forkserver" or words(pid) == STAND_IN]
                judge_supervisors = [pid for pid in _running(child) if name(pid) == "kq-judge-super"]
                found += set(_running(child)) - {*task_processes(child)[:2], *servers[:1], *judge_supervisors[:1]}
                # Judges persist, and references and a candidate are kept for later evaluations for a while.
                others = [pid for one in _running(child) for pid in below(one) if running(pid)]
                found += [pid for pid in others if name(pid) not in ("kq-reference", "kq-judge") and not waits(pid)]
    return found


def _running(pid: int) -> list[int]:
    return [child for child in linux.children(pid) if running(child)]


def _works(pid: int) -> bool:
    """Return whether a process is a worker, or was forked from one."""
    return words(pid)[3:5] in (["workers.start", "worker"], ["judges", "worker"])


def task_processes(worker: int) -> list[int]:
    """Return the pids of a worker's task processes."""
    return [pid for pid in _running(worker) if _works(pid) and name(pid)[:3] != "kq-"]


def worker_of(fleet: Fleet, attempt: Any) -> int:
    """Return the pid of the worker that runs an attempt."""
    [worker] = [worker for worker in fleet.live() if worker.id == attempt.worker_id]
    return worker.pid


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants at once, like a power failure."""
    everyone = [pid, *below(pid)]
    for one in everyone:
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGSTOP)
    for one in everyone:
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


class Halted:
    """Halts a server by SIGSTOP inside the `with` block, so that it neither answers nor exits."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._halted: list[int] = []

    def __enter__(self) -> None:
        # The server comes first: while halted it forks no processes. Its existing children can still exit by
        # themselves.
        os.kill(self._pid, signal.SIGSTOP)
        self._halted = [self._pid, *below(self._pid)]
        for pid in self._halted[1:]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def __exit__(self, *_: object) -> None:
        for pid in self._halted:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
