"""The worker's pool: Celery's prefork pool, changed so that one-task children start and die fast.

A worker runs one task at a time, and a child runs one kernel. Stock Celery 5.7 on billiard 4.3 runs 0.24 one-task
children per second, because it usually misses a child's end: the sentinel pipe closes a moment before the process can
be waited for, so the parent sees a live child, stops watching it, and checks again only when a 5 s timer fires. It
notices a segmentation fault after 4 s. The changes and their reasons:

==================================  ====================================================================
pidfd instead of the pipe           It is readable exactly when the child can be waited for, so there is no race. A
                                    child that only closes its descriptors cannot fake its end, which with the pipe
                                    blocks stock Celery's event loop forever.
5 ms between polls of the counter   A child that has answered waits until its answer was read. Stock Celery polls
                                    every 100 ms.
upkeep every 0.25 s                 It notices ends that all other checks missed. Stock Celery does it every 5 s.
SIGKILL first, then report          At a hard limit, stock Celery reports while the child still runs, asks it to
                                    stop, and waits in a way that the child can make endless.
process group, subreaper, sweep     The processes that a child started are killed with it, even after they left its
                                    group or session. No wait for them is unbounded.
structured exit status              Stock Celery gives it only in the text of a message.
recycled by judging, not by tasks   A task that claims nothing, or whose evaluation static checks decide, leaves its
                                    child clean, and a fork costs more than such a task. The status page records
                                    which child was used up and gets no further task.
parent-death signal by one call     Stock Celery imports a parser of C in every child to call one function of the C
                                    library.
SIGKILL at an interrupted write     Stock Celery stops its pool in the handler of a cold stop's signal. If the signal
                                    came while a task was written, the child waits for the rest, and the parent for the
                                    child.
a spare child                       It is forked and connected while the other child judges, so that the next task
                                    starts at once. It gets its task when the other child's task has ended.
==================================  ====================================================================

``benchmarks/respawn.py`` compares the two pools, and ``tests/fleet`` checks the gap between two tasks. The module
extends private parts, so celery, billiard and kombu are pinned to minor versions.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, Final
from uuid import UUID

import billiard.pool
import billiard.process
from billiard.einfo import ExceptionInfo
from billiard.exceptions import WorkerLostError
from celery import platforms
from celery.concurrency import asynpool, prefork
from celery.utils.log import get_logger
from celery.worker import state

from workers.judge import deaths
from workers.judge.host import linux
from workers.judge.host.status_page import TASK_PROCESSES, StatusPage

_log: Any = get_logger(__name__)

#: Seconds between polls of a finished child that waits until its answer was read, and the number of polls.
_ANSWER_READ_POLL_S: Final = 0.005
_ANSWER_READ_POLLS: Final = 6000
_UPKEEP_S: Final = 0.25
#: Seconds from the end of a used-up child to the fork of its replacement.
_REPLACE_AFTER_S: Final = 0.03
#: Children beyond those that have tasks.
_SPARE: Final = TASK_PROCESSES - 1
#: Seconds after which a killed process that has not died makes its slot stuck. Releasing a GPU takes a moment, but a
#: process that hangs in the kernel or a driver never dies.
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
    """Send SIGKILL to a process that has not been reaped, and to the process group that it leads."""
    for kill in (os.kill, os.killpg):
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


class _Child(asynpool.Worker):
    """A child that leads a process group, so that the whole group can be killed at once. It ends when it is used up.

    Attributes:
        status_page: the page that records whether the child is used up. If None, any task uses it up.
    """

    status_page: StatusPage | None = None

    def after_fork(self) -> None:
        os.setpgid(0, 0)
        if self.status_page is not None:
            child: Any = billiard.process.current_process()
            self.status_page.begin(child.index)
        super().after_fork()

    def _make_child_methods(self, *args: Any, **kwargs: Any) -> None:
        super()._make_child_methods(*args, **kwargs)
        status_page, receive = self.status_page, self.wait_for_job
        if status_page is None:
            return
        self.maxtasks = None

        def next_task(*args: Any, **kwargs: Any) -> Any:
            if status_page.used:
                sys.exit(billiard.pool.EX_RECYCLE)
            return receive(*args, **kwargs)

        self.wait_for_job = next_task


class _KillFirst(billiard.pool.TimeoutHandler):
    """Kills a child at its hard limit before anything is recorded or reported."""

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

    def __init__(self, processes: int, *args: Any, **kwargs: Any) -> None:
        # Children that the worker started before the pool, such as the fork server, are not the pool's to kill.
        self._services = frozenset(linux.children(os.getpid()))
        self._unswept = False
        super().__init__(processes + _SPARE, *args, **kwargs)

    @property
    def timers(self) -> dict[Any, float]:
        return {self._upkeep: _UPKEEP_S}

    def _upkeep(self) -> None:
        self.maintain_pool()
        if self._unswept:
            self._sweep()

    def _track_child_process(self, proc: Any, hub: Any) -> None:
        # The parent class watches the descriptor in this attribute, and closes it at the end.
        if not hasattr(proc, "_sentinel_poll"):
            proc._sentinel_poll = os.pidfd_open(proc.pid)
        super()._track_child_process(proc, hub)

    def _event_process_exit(self, hub: Any, proc: Any) -> None:
        # The child has ended but was not reaped, so no other process group can have its id.
        kill_group(proc.pid)
        self._sweep()
        if proc.exitcode == billiard.pool.EX_RECYCLE:
            # It has answered. Replacing it takes 30 ms, so the loop first gives the next task to the spare child.
            self._untrack_child_process(proc, hub)
            hub.call_later(_REPLACE_AFTER_S, self.maintain_pool)
        else:
            super()._event_process_exit(hub, proc)

    def _sweep(self) -> None:
        was_unswept, self._unswept = self._unswept, not linux.sweep(self._services | {p.pid for p in self._pool})
        if self._unswept and not was_unswept:
            _log.warning("a process that a task left behind does not die, trying again")

    def on_job_ready(self, job: Any, i: Any, obj: Any, inqW_fd: int) -> None:  # noqa: N803
        status_page, child = self.Worker.status_page, self._fileno_to_inq.get(inqW_fd)
        if status_page is not None and child is not None and status_page.used_up(child.index):
            return  # it is about to end, and counts as busy until then
        super().on_job_ready(job, i, obj, inqW_fd)

    def mark_as_worker_lost(self, job: Any, exitcode: int) -> None:
        try:
            raise ChildDied(exitcode)
        except ChildDied:
            job._set(None, (False, ExceptionInfo()))

    def terminate_job(self, pid: int, sig: int | None = None) -> None:  # noqa: ARG002
        # The parent cleans up for its child, and the child can ignore milder signals.
        super().terminate_job(pid, signal.SIGKILL)


class TaskPool(prefork.TaskPool):
    """The pool that Celery's setting ``worker_pool`` names."""

    Pool = _Pool
    #: Killed children that have not died, with the monotonic time at which each was first seen.
    _doomed: Mapping[int, float] = MappingProxyType({})

    @staticmethod
    def watch(status_page: StatusPage) -> None:
        """Recycle children by the status page from now on. Call this before the pool starts."""
        _Child.status_page = status_page

    @property
    def num_processes(self) -> int:
        """The number of concurrent tasks, which is also the number of messages that Celery fetches."""
        pool: Any = self
        return pool.limit

    def stuck(self, *, also_of: int) -> bool:
        """Return whether a killed process has not died for ``STUCK_S`` seconds. Call this regularly.

        Args:
            also_of: another process whose children count too.
        """
        now = time.monotonic()
        children = [*linux.children(os.getpid()), *linux.children(also_of)]
        doomed = [pid for pid in children if linux.is_doomed(pid)]
        self._doomed = {pid: self._doomed.get(pid, now) for pid in doomed}
        return any(now - since > STUCK_S for since in self._doomed.values())

    def abort(self, evaluation_id: UUID) -> None:
        """End the running task of an evaluation in the same way as its hard limit."""
        pool: Any = self._pool
        jobs = [job for job in pool._cache.values() if job.correlation_id == str(evaluation_id) and job._time_accepted]
        for job in jobs:
            pool.on_hard_timeout(job)

    def on_start(self) -> None:
        billiard.pool.GUARANTEE_MESSAGE_CONSUMPTION_RETRY_INTERVAL = _ANSWER_READ_POLL_S
        billiard.pool.GUARANTEE_MESSAGE_CONSUMPTION_RETRY_LIMIT = _ANSWER_READ_POLLS
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        of_stock: Any = platforms
        of_stock._set_pdeathsig = partial(linux.prctl, linux.PR_SET_PDEATHSIG)
        super().on_start()

    def on_stop(self) -> None:
        pool: Any = self._pool
        if pool is not None and state.should_terminate:
            for job in pool._cache.values():
                if job._write_to and job._writer() in pool._active_writers:
                    kill_group(job._write_to.pid)
        super().on_stop()
