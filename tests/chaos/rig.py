"""What tests of chaos do to a fleet, and what must hold in the end."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Any, Final
from uuid import UUID

from tests.chaos.family import below
from tests.fleet.conftest import Fleet, Services

#: Generous: the machine that runs the tests may have other things to do.
PATIENCE_S: Final = 90.0


class Whole:
    """What holds of evaluations in the end, whatever happened."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def __call__(self, *ids: UUID, category: str = "passed", attempts: int | None = None) -> list[Any]:
        """Wait for one verdict each, of this category; no attempt is open, no lease held, and a next one passes.

        Returns:
            The attempts of all of them, in order.
        """
        services = self._services
        deadline = time.monotonic() + PATIENCE_S
        for identity in ids:
            verdict = services.verdict(identity, max(1.0, deadline - time.monotonic()))
            assert verdict.category == category, verdict
            if attempts is not None:
                assert verdict.attempts == attempts, [tuple(a) for a in services.attempts(identity)]
        services.until(
            lambda: not services.rows("SELECT 1 FROM attempts WHERE ended_at IS NULL"), 30, "no open attempt"
        )
        told = services.rows(
            "SELECT e.id, e.state, count(v.evaluation_id) AS verdicts FROM evaluations AS e "
            "LEFT JOIN verdicts AS v ON v.evaluation_id = e.id WHERE e.id = ANY(:ids) GROUP BY e.id",
            ids=list(ids),
        )
        assert {(row.state, row.verdicts) for row in told} == {("done", 1)}
        assert services.verdict(services.submit("ok", attempts=3), PATIENCE_S).passed
        return [attempt for identity in ids for attempt in services.attempts(identity)]


def worker_of(fleet: Fleet, attempt: Any) -> int:
    """The pid of the worker that makes an attempt."""
    [worker] = [worker for worker in fleet.live() if worker.id == attempt.worker_id]
    return worker.pid


def kill_tree(pid: int) -> None:
    """SIGKILL a process and all below it in one go, as when its machine is switched off."""
    everyone = [pid, *below(pid)]
    for one in everyone:
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGSTOP)
    for one in everyone:
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


class Halted:
    """A server that neither answers nor ends, within a `with` block: SIGSTOP to all its processes."""

    def __init__(self, pid: int) -> None:
        self._pids = [pid, *below(pid)]

    def __enter__(self) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGSTOP)

    def __exit__(self, *_: object) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
