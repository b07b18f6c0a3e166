"""The worker's pool: Celery's prefork pool, with what keeps one-task children quick and killable.

A worker has one child at a time and a child runs one task. Stock Celery 5.7 on billiard 4.3 does that at
0.24 tasks a second, because a child's end is mostly missed: its sentinel pipe closes a moment before the
process can be waited for, the parent looks at once, sees a living child, stops watching, and looks again
only when a 5 s timer fires. A segmentation fault is then known after 4 s. What is changed, each with the
reason:

==================================  ====================================================================
pidfd instead of the pipe           readable exactly when the child can be waited for: no race, and a
                                    child that closes its descriptors and lives on cannot fake its end
                                    (with the pipe it blocks stock Celery's event loop for good)
5 ms between looks at the counter   a child that has answered waits until its answer was read; stock
                                    Celery looks every 100 ms
upkeep every 0.25 s                 the net under all this; 5 s in stock Celery
SIGKILL first, then report          at a hard limit stock Celery reports while the child still runs, asks
                                    it to stop, and waits for it in a way that a child can make endless
own process group, subreaper, sweep what a child leaves behind is killed with it, also what left its group
                                    or session; nothing of it waits without a bound
structured exit status               stock Celery tells it in the message's text only
==================================  ====================================================================

``benchmarks/respawn.py`` measures both pools side by side; ``tests/fleet`` holds the gap between two tasks.
All of it extends private parts: celery, billiard and kombu are pinned to their minor versions.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final

import billiard.pool
from billiard.einfo import ExceptionInfo
from billiard.exceptions import WorkerLostError
from celery.concurrency import asynpool, prefork
from celery.utils.log import get_logger

from workers.judge import deaths
from workers.judge.host import linux

_log: Any = get_logger(__name__)

#: Seconds between a finished child's looks at whether its answer was read, and how often it looks.
_ANSWER_READ_POLL_S: Final = 0.005
_ANSWER_READ_POLLS: Final = 6000
_UPKEEP_S: Final = 0.25
#: The longest that the event loop is held up by killing what a child left behind.
_SWEEP_S: Final = 0.02
#: How long a killed process may take to go before its slot counts as stuck. Giving back a GPU takes a moment; one
#: that hangs in the kernel or a driver takes for ever.
STUCK_S: Final = 5.0


class ChildDied(WorkerLostError):
    """The child ended before it answered.

    Attributes:
        exitcode: its exit status, or the negative number of the signal that ended it.
    """

    def __init__(self, exitcode: int) -> None:
        super().__init__(deaths.describe(exitcode))
        self.exitcode = exitcode


def kill_group(pid: int) -> None:
    """SIGKILL a process that was not reaped yet, and the process group that it leads."""
    for kill in (os.kill, os.killpg):
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def sweep(keep: frozenset[int] | set[int]) -> bool:
    """SIGKILL and reap this process's direct children but ``keep``, and what they leave in turn.

    Returns:
        Whether all are gone; False after 20 ms, as a process stuck in a driver does not die when told to.
    """
    deadline = time.monotonic() + _SWEEP_S
    while strangers := [pid for pid in linux.children(os.getpid()) if pid not in keep]:
        for pid in strangers:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.0005)
    return True


class _Child(asynpool.Worker):
    """Leads a process group, so that all of it can be killed at once."""

    def after_fork(self) -> None:
        os.setpgid(0, 0)
        super().after_fork()


class _KillFirst(billiard.pool.TimeoutHandler):
    """At a hard limit the child is dead before anything is recorded or reported."""

    def on_hard_timeout(self, job: Any) -> None:
        process, _ = self._process_by_pid(job._worker_pid)
        if process is not None and not job.ready():
            kill_group(process.pid)
        super().on_hard_timeout(job)

    def _trywaitkill(self, worker: Any) -> None:
        kill_group(worker.pid)


class _Pool(asynpool.AsynPool):
    Worker = _Child
    TimeoutHandler = _KillFirst

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # What the worker started before it had a pool, such as the fork server, is its own.
        self._services = frozenset(linux.children(os.getpid()))
        self._unswept = False
        super().__init__(*args, **kwargs)

    @property
    def timers(self) -> dict[Any, float]:
        return {self._upkeep: _UPKEEP_S}

    def _upkeep(self) -> None:
        self.maintain_pool()
        if self._unswept:
            self._sweep()

    def _track_child_process(self, proc: Any, hub: Any) -> None:
        # The parent class watches whatever descriptor it finds here, and closes it in the end.
        if not hasattr(proc, "_sentinel_poll"):
            proc._sentinel_poll = os.pidfd_open(proc.pid)
        super()._track_child_process(proc, hub)

    def _event_process_exit(self, hub: Any, proc: Any) -> None:
        # Ended but not yet reaped: its group's number cannot belong to anybody else.
        kill_group(proc.pid)
        self._sweep()
        super()._event_process_exit(hub, proc)

    def _sweep(self) -> None:
        was_unswept, self._unswept = self._unswept, not sweep(self._services | {p.pid for p in self._pool})
        if self._unswept and not was_unswept:
            _log.warning("a process that a task left behind does not die; it is tried again")

    def mark_as_worker_lost(self, job: Any, exitcode: int) -> None:
        try:
            raise ChildDied(exitcode)
        except ChildDied:
            job._set(None, (False, ExceptionInfo()))

    def terminate_job(self, pid: int, sig: int | None = None) -> None:  # noqa: ARG002
        # A child has nothing to tidy up that its parent does not, and may not listen to anything milder.
        super().terminate_job(pid, signal.SIGKILL)


class TaskPool(prefork.TaskPool):
    """The setting ``worker_pool`` names this class."""

    Pool = _Pool
    #: Children that were killed and are still there, and since when that is known.
    _doomed: Mapping[int, float] = MappingProxyType({})

    def stuck(self) -> bool:
        """Whether a process that was killed has not died for a while. To be asked every so often."""
        now = time.monotonic()
        doomed = [pid for pid in linux.children(os.getpid()) if linux.is_doomed(pid)]
        self._doomed = {pid: self._doomed.get(pid, now) for pid in doomed}
        return any(now - since > STUCK_S for since in self._doomed.values())

    def abort(self) -> None:
        """End the running task as its hard limit would."""
        pool: Any = self._pool
        for job in [job for job in pool._cache.values() if job._time_accepted]:
            pool.on_hard_timeout(job)

    def on_start(self) -> None:
        billiard.pool.GUARANTEE_MESSAGE_CONSUMPTION_RETRY_INTERVAL = _ANSWER_READ_POLL_S
        billiard.pool.GUARANTEE_MESSAGE_CONSUMPTION_RETRY_LIMIT = _ANSWER_READ_POLLS
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        super().on_start()
