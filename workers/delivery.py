"""The worker's parent records the outcome if the task process could not, and reports it to Flower.

Celery runs the task process as a child, which records its judge's outcome or its judge's death. :class:`Request`
reports every other end to the parent, which reads the status page (:mod:`workers.judge.host.status_page`) and records
the outcome. The first writer wins. "It" is the judge or the task process, whichever ended:

============================================  ==========================  ================================
how it ended                                  its state                   the record and its writer
============================================  ==========================  ================================
it finished                                   any                         its outcome, by the judge
``evaluate`` raised                           any                         ``judge_error``, by the judge
it could not reach Postgres for 30 s          before its claim            nothing: still queued, sent again
it could not reach Postgres for 30 s          after its claim             ``worker_lost``, by the worker
it died                                       before its claim            nothing: still queued, sent again
it died                                       claimed, page not open yet  ``worker_lost``, by the worker
SIGKILL or another signal sent from outside   any                         ``worker_lost``, by the worker
another signal, or an exit                    not testing the GPU         ``judge_error``, by the worker
Celery's hard limit                           not testing the GPU         ``judge_error``, by the worker
a hard limit, another signal, or an exit      testing the GPU             ``gpu_unhealthy``, by the worker
revoked (cancelled) while it ran              any                         ``cancelled``, attempt closed
revoked while it was queued                   -                           ``cancelled``
a cold stop of the worker (SIGQUIT)           any                         ``worker_lost``, handed back, worker
a quick stop of the fleet (SIGINT)            any                         the same, by the supervisor
a warm stop (SIGTERM)                         any                         its outcome, by the judge
the worker's parent died                      any                         ``worker_lost``, by the supervisor
the supervisor or the host died               any                         ``worker_lost``, by a sweeper
it could not read another version's request   claimed                     ``judge_error``, by the judge
the stored request is invalid                 claimed                     ``invalid_request``, by the judge
============================================  ==========================  ================================

The record concerns the evaluation of Celery's request, never the one that runs by then. A revoked evaluation frees its
worker before its task process is known to be dead, so the spare task process can already have begun the next one.

An attempt that was handed back does not count. For failures of Redis, Postgres, disks and clocks see docs/recovery.md.

No foreign code runs in a judge, so neither a kernel nor a problem can kill it. Nothing here waits for Postgres longer
than a few seconds, because the worker's event loop stands still meanwhile. If Postgres is away, the worker ends
instead: a live worker's leases are renewed, so only its end frees the evaluation for another worker.
"""

from __future__ import annotations

import os
import signal
from ast import literal_eval
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final
from uuid import UUID

import structlog
from billiard.einfo import ExceptionWithTraceback
from celery.exceptions import Terminated, TimeLimitExceeded
from celery.worker import request, state
from sqlalchemy import Engine, event

from kqueue.categories import Category
from kqueue.config import Config
from kqueue.contract import Outcome, Phase
from kqueue.errors import ServiceError, UnknownEvaluation
from kqueue.evidence import Facts
from kqueue.states import Writer
from kqueue.store import engine as store_engine
from kqueue.store import evaluations
from workers.judge import deaths
from workers.judge.host import linux
from workers.judge.host.status_page import Record, StatusPage
from workers.pool import ChildDied
from workers.slot import Slot

_log: Any = structlog.get_logger(__name__)

#: Number of consecutive failures of the fleet after which the worker is tested by an evaluation of the fleet's own
#: (:mod:`workers.app`), or of deaths of task processes, which cannot be tested, after which it ends.
MOST_FAILURES: Final = 10
#: Seconds that the worker's event loop waits for a connection to Postgres, and for each statement.
_PATIENCE_S: Final = 2


def outcome_of(error: BaseException, record: Record, *, out_of_memory: bool = False) -> Outcome:
    """Return the outcome of a claimed attempt whose judge did not record one, by the table above.

    Args:
        error: Celery's report, such as :class:`~workers.pool.ChildDied`.
        record: the judge's last record on the status page.
        out_of_memory: whether the kernel's out-of-memory killer struck while it ran.
    """
    if isinstance(error, Terminated):
        return Outcome(
            category=Category.CANCELLED, message="the evaluation was cancelled while it ran", phase=record.phase
        )
    if isinstance(error, TimeLimitExceeded):
        if record.phase is Phase.SELF_TEST:
            category, message = Category.GPU_UNHEALTHY, "the GPU self-test did not end within its deadline"
        else:
            category, message = Category.JUDGE_ERROR, "the judge overran Celery's hard limit"
        return Outcome(category=category, message=message, phase=record.phase, facts=Facts(hard_limit=True))
    if isinstance(error, SystemExit):
        error = ChildDied(error.code if isinstance(error.code, int) else 1)
    if not isinstance(error, ChildDied):
        message = f"the task process could not record its outcome: {type(error).__name__}"
        return Outcome(category=Category.WORKER_LOST, message=message, phase=record.phase)
    return deaths.explain(error.exitcode, record.phase, out_of_memory=out_of_memory)


class Recorder:
    """The writer of outcomes that task processes could not record. Each worker's parent has one.

    It connects on demand.
    """

    def __init__(self, config: Config, slot: Slot, status_page: StatusPage) -> None:
        self._slot = slot
        self._status_page = status_page
        self._retry_delay_s = config.retry_delay_s
        self._engine = _impatient(
            store_engine.connect(config.require_database(), application=f"kqueue worker {slot.name}", pool_size=1)
        )

    def settle(
        self, evaluation_id: UUID, error: BaseException, *, oom_kills: int = 0, handed_back: bool = False
    ) -> Outcome | None:
        """Record the outcome of an attempt that ended with ``error``. Return None if no attempt was on the status page.

        Args:
            evaluation_id: the evaluation, which need not be the running one.
            error: Celery's report.
            oom_kills: the out-of-memory killer's count when the child began.
            handed_back: whether the child was killed because the worker stops.
        """
        record = self._status_page.find(evaluation_id)
        if record is None:
            # Usually no attempt is open, except after a death between the claim and the first record on the page.
            self._record(
                lambda: evaluations.lose_worker(
                    self._engine,
                    self._slot.worker_id,
                    evaluation_id=evaluation_id,
                    retry_delay_s=self._retry_delay_s,
                    message=f"the judge ended before it began: {type(error).__name__}",
                    handed_back=handed_back,
                )
            )
            return None
        if handed_back:
            message = "the worker was stopped at once"
            outcome = Outcome(category=Category.WORKER_LOST, message=message, phase=record.phase)
        else:
            outcome = outcome_of(error, record, out_of_memory=linux.out_of_memory_kills() > oom_kills)
        end = partial(evaluations.finish, self._engine, record.evaluation_id, record.number, outcome)
        self._record(lambda: end(written_by=Writer.WORKER, retry_delay_s=self._retry_delay_s, handed_back=handed_back))
        self._status_page.forget(record)
        _log.warning(
            "recorded an outcome that the judge could not",
            evaluation=str(record.evaluation_id),
            attempt=record.number,
            category=str(outcome.category),
            reason=outcome.message,
        )
        return outcome

    def count_death(self) -> None:
        """Count the death of a task process as a failure. End the worker after too many."""
        self._status_page.failures[0] += 1
        if self._status_page.failures[0] >= MOST_FAILURES:
            _log.error("many consecutive failures of the fleet: this worker ends")
            os.kill(os.getpid(), signal.SIGTERM)

    def cancel(self, evaluation_id: UUID) -> None:
        """End an evaluation as ``cancelled`` unless it has its verdict."""
        try:
            evaluations.cancel(self._engine, evaluation_id)
        except UnknownEvaluation:
            _log.warning("a task was revoked that is no evaluation", evaluation=str(evaluation_id))
        except ServiceError as error:
            _log.error(
                "a revoked evaluation could not be cancelled and will be sent again",
                evaluation=str(evaluation_id),
                reason=str(error),
            )

    def _record(self, write: Callable[[], object]) -> None:
        try:
            write()
        except Exception as error:  # noqa: BLE001
            # After any error the attempt can still be open, and it stays open while this worker is alive.
            _log.exception("an outcome could not be recorded: this worker ends", reason=str(error))
            os.kill(os.getpid(), signal.SIGTERM)


class Request(request.Request):
    """Celery's view of one delivery, in the worker's parent.

    This class corrects four faults: stock Celery 5.7 reports a hard limit twice, shows Flower a killed child's failure
    as ``ExceptionWithTraceback()`` and every other outcome as a success, and waits at a cold stop for a task that no
    child has accepted yet.
    """

    _reason = ""
    _oom_kills = 0

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        """Note that a child has begun the task."""
        self._oom_kills = linux.out_of_memory_kills()
        super().on_accepted(pid, time_accepted)
        if state.should_terminate:
            self.cancel(self.task.pool)

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> None:
        """Record the failure of a task that raised (``return_ok``) or whose child is gone. Called once for each."""
        error = exc_info.exception
        if isinstance(error, ExceptionWithTraceback):
            error = error.exc
        # A cold stop kills the child because the worker ends.
        outcome = self.task.recorder.settle(
            UUID(self.id), error, oom_kills=self._oom_kills, handed_back=self._already_cancelled
        )
        self._reason = f"{outcome.category}: {outcome.message}" if outcome else type(error).__name__
        if not self._already_revoked:
            self.task.recorder.count_death()
        super().on_failure(exc_info, send_failed_event=send_failed_event, return_ok=return_ok)

    def on_timeout(self, soft: bool, timeout: float) -> None:  # noqa: ARG002
        """Log the hard limit. :meth:`on_failure` was called just before and did the rest."""
        _log.error("the judge overran Celery's hard limit", evaluation=self.id, limit_s=timeout)

    def send_event(self, type: str, **fields: Any) -> None:  # noqa: A002
        """Send an event to Flower, with the outcome of a task that returned.

        Celery replaces ``on_success``, but calls this from it. A failure shows only its category, because a traceback
        could quote a source.
        """
        if type == "task-succeeded":
            result = literal_eval(fields["result"])
            if result["category"] not in (None, Category.PASSED):
                type, fields = "task-failed", {}  # noqa: A001
                self._reason = f"{result['category']} (blame: {result['blame']})"
        if type == "task-failed":
            fields |= {"exception": self._reason, "traceback": ""}
        super().send_event(type, **fields)

    def _announce_revoked(self, *args: Any, **kwargs: Any) -> None:
        super()._announce_revoked(*args, **kwargs)
        with suppress(ValueError):
            self.task.recorder.cancel(UUID(self.id))


def _impatient(engine: Engine) -> Engine:
    """Set short timeouts on an engine, because the event loop waits for it."""

    def configure(_dialect: Any, _record: Any, _args: Any, options: dict[str, Any]) -> None:
        limit_ms = _PATIENCE_S * 1000
        options["connect_timeout"] = _PATIENCE_S
        options["tcp_user_timeout"] = limit_ms
        options["options"] += f" -c statement_timeout={limit_ms} -c lock_timeout={limit_ms}"

    event.listen(engine, "do_connect", configure)
    return engine
