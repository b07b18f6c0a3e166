"""The Celery application that a slot's worker process runs.

The supervisor (:mod:`workers.fleet`) starts the process. :mod:`workers.start` imports torch and Triton and forks the
slot's fork server and its judges' seat. From then on the worker's parent only forks: clerks, each of which claims one
evaluation, has the slot's judge judge it, and records the outcome. One whose evaluations end by reading sees to others.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import socket
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Final
from uuid import UUID

import structlog
from celery import Task, signals
from celery.platforms import SecurityWarning
from sqlalchemy import Engine
from structlog.contextvars import bound_contextvars

from kqueue import broker, logs
from kqueue.categories import Blame
from kqueue.config import Config, load
from kqueue.contract import Outcome, Phase
from kqueue.errors import ConfigError, DatabaseUnavailable, SchemaMismatch
from kqueue.states import Writer
from kqueue.store import engine as store_engine
from kqueue.store import evaluations
from kqueue.store.evaluations import Claim, Recorded
from workers import delivery, messages
from workers.backend import StoredBackend
from workers.judge import api, deaths
from workers.judge.api import Judges
from workers.pool import TaskPool
from workers.slot import FREE, GO, READY, READY_VARIABLE, STUCK, VARIABLE, Slot

_log: Any = structlog.get_logger(__name__)

#: How long a judge tries to claim its evaluation, and to record its outcome, while Postgres is away or has another
#: version's schema, in seconds. One that did not wait would use up all messages in Redis meanwhile.
_PATIENCE_S: Final = 30.0
_RETRY_S: Final = 0.5
#: How many evaluations a child may see to that end by reading.
_MOST_READ: Final = 500
#: Seconds between looks at what may have happened to the worker.
_LOOK_S: Final = 0.2
#: And at its children, which costs more and tells of what has lasted for seconds.
_LOOK_AT_CHILDREN_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class _Worker:
    """The state that the parent makes before it forks."""

    config: Config
    slot: Slot
    engine: Engine
    judges: Judges
    pid: int


_worker: _Worker | None = None


class _Evaluate(Task):
    Request = delivery.Request
    recorder: delivery.Recorder | None = None
    pool: TaskPool | None = None


def _make_app() -> Any:
    lanes = Slot.from_environment().lanes if VARIABLE in os.environ else ("cpu", "gpu")
    return broker.make_app(load(), lanes=lanes, patience_s=broker.CONSUMER_PATIENCE_S)


app = _make_app()
# Celery warns of root. A fleet that is root runs each candidate as somebody else, which others cannot.
warnings.filterwarnings("ignore", category=SecurityWarning)


def start_judges(slot: Slot) -> Judges:  # noqa: ARG001
    """The slot's judges, whose seat :mod:`workers.start` has forked before this module was imported."""
    if api.started is None:
        raise ConfigError("this process has no judges: start workers with `python -m workers.fleet`")
    return api.started


def run_evaluation(claim: Claim, slot: Slot, judges: Judges, engine: Engine) -> Outcome:
    """Have the slot's judge judge."""
    config = load()
    own = replace(slot, gpu_shared=config.gpu_shared, alone=claim.alone)
    backend = StoredBackend(engine, claim.attempt_id, judges.conditions if config.reuse else None)
    return judges.judge(claim.request, own, backend)


@app.task(name=broker.EVALUATE, base=_Evaluate)
def evaluate(evaluation_id: str) -> dict[str, Any]:
    """Execute one evaluation; what is returned is what Flower shows.

    The child is used up by an evaluation that goes beyond reading, and by whatever goes wrong. One whose evaluations
    ended by reading, or that has claimed nothing, takes the next task.

    Raises:
        DatabaseUnavailable, SchemaMismatch: Postgres was away for long, or has another version's schema. The
            worker's parent sees to the attempt.
    """
    worker = _require()
    try:
        with bound_contextvars(evaluation=evaluation_id):
            return _execute(worker, UUID(evaluation_id))
    except BaseException:
        worker.judges.status_page.use()
        raise


def _execute(worker: _Worker, evaluation_id: UUID) -> dict[str, Any]:
    claim = _claim(worker, evaluation_id)
    if claim is None:
        return {"evaluation": str(evaluation_id), "category": None, "note": "not claimed"}
    worker.judges.status_page.open(claim.evaluation_id, claim.number)
    with bound_contextvars(attempt=claim.number):
        return _see_to(worker, claim)


def _see_to(worker: _Worker, claim: Claim) -> dict[str, Any]:
    """Have a claimed evaluation judged, and record the outcome."""
    _log.debug("an attempt begins", lane=claim.lane, alone=claim.alone)
    outcome, writer = _judge(worker, claim)
    _child.read += 1
    if outcome.category.blame is Blame.FLEET or _child.read >= _MOST_READ:
        worker.judges.status_page.use()
    if outcome.category.blame is Blame.FLEET and not worker.judges.work() and os.getppid() == worker.pid:
        # Told before this task ends: the next evaluations would fail for the same want, and use up a try each.
        os.kill(worker.pid, signal.SIGTERM)
    recorded = _finish(worker, claim, outcome, writer)
    worker.judges.status_page.close()
    _log.info("an attempt ended", category=str(outcome.category), recorded=recorded.value, lane=claim.lane)
    return {
        "evaluation": str(claim.evaluation_id),
        "category": str(outcome.category),
        "blame": str(outcome.category.blame),
        "attempt": claim.number,
        "recorded": recorded.value,
    }


if VARIABLE in os.environ:
    messages.guard(app)


@dataclass(slots=True)
class _Child:
    """This child of the worker's: how many evaluations it has seen to, all of which ended by reading."""

    read: int = 0


_child = _Child()


def _claim(worker: _Worker, evaluation_id: UUID) -> Claim | None:
    """Begin an attempt; None where somebody else did, or it is not to begin now."""
    deadline = time.monotonic() + _PATIENCE_S
    failed = False
    while True:
        try:
            claim = evaluations.claim(
                worker.engine, evaluation_id, worker_id=worker.slot.worker_id, lease_s=worker.config.lease_s
            )
            if claim is None and failed:
                # A connection that broke at the end may have kept the answer: then this worker has it.
                evaluations.lose_worker(
                    worker.engine,
                    worker.slot.worker_id,
                    evaluation_id=evaluation_id,
                    retry_delay_s=worker.config.retry_delay_s,
                    message="the answer to the claim was lost: nothing was begun",
                    handed_back=True,
                )
            return claim
        except (DatabaseUnavailable, SchemaMismatch) as error:
            if time.monotonic() >= deadline:
                raise
            # The connection is as old as this child. Another server may have taken over since.
            worker.engine.dispose()
            if not failed:
                _log.warning("an evaluation waits for Postgres", reason=str(error))
            failed = True
            time.sleep(_RETRY_S)


def _judge(worker: _Worker, claim: Claim) -> tuple[Outcome, Writer]:
    """Return the outcome, and who tells it: the judge, or this worker where the judge died."""
    writer = Writer.JUDGE
    try:
        outcome = deaths.outcome_of(lambda: run_evaluation(claim, worker.slot, worker.judges, worker.engine))
    except deaths.JudgeDied as died:
        outcome, writer = died.outcome, Writer.WORKER
        _log.warning("the judge died", reason=outcome.message)
    evidence = outcome.evidence
    if evidence.traceback is not None:
        _log.error("the judge failed", traceback=evidence.traceback)
    if claim.alone:
        outcome = outcome.model_copy(update={"evidence": evidence.model_copy(update={"alone": True})})
    return outcome, writer


def _finish(worker: _Worker, claim: Claim, outcome: Outcome, writer: Writer) -> Recorded:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return evaluations.finish(
                worker.engine,
                claim.evaluation_id,
                claim.number,
                outcome,
                written_by=writer,
                retry_delay_s=worker.config.retry_delay_s,
            )
        except (DatabaseUnavailable, SchemaMismatch) as error:
            if time.monotonic() >= deadline:
                _log.error(
                    "an outcome is lost, as Postgres stayed away: the evaluation will be judged again",
                    category=str(outcome.category),
                    reason=str(error),
                )
                raise
            time.sleep(_RETRY_S)


def _require() -> _Worker:
    if _worker is None:
        raise ConfigError("this process serves no slot: start workers with `python -m workers.fleet`")
    return _worker


# The worker's life, in order.

#: The worker's parent: the process that imports this module.
_PARENT: Final = os.getpid()


def _vital(when: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Connect a handler to a signal of Celery, which only logs what a handler raises: here it ends the worker."""

    def connect(handler: Callable[..., None]) -> Callable[..., None]:
        @when.connect(weak=False)
        @wraps(handler)
        def run(**fields: Any) -> None:
            try:
                handler(**fields)
            except BaseException as error:  # noqa: BLE001
                try:
                    _log.exception("this worker cannot go on and ends", at=handler.__name__, reason=str(error))
                finally:
                    if os.getpid() != _PARENT:
                        os.kill(_PARENT, signal.SIGTERM)
                    os._exit(1)

        return handler

    return connect


@_vital(signals.setup_logging)
def _set_up_logging(**_: Any) -> None:
    logs.configure(load(), slot=Slot.from_environment().name if VARIABLE in os.environ else "none")


@_vital(signals.worker_init)
def _prepare(**_: Any) -> None:
    """In the parent, before it has a pool."""
    global _worker
    config = load()
    if VARIABLE not in os.environ:
        raise ConfigError(f"{VARIABLE} is not set: start workers with `python -m workers.fleet`")
    slot = Slot.from_environment()
    judges = start_judges(slot)
    judges.wait_ready(config.isolation)
    conditions = judges.conditions if config.reuse else "none"  # found out here, once for all children
    _log.debug("what verdicts depend on beside the environment", conditions=conditions)
    _worker = _Worker(config, slot, _database(config, slot), judges, os.getpid())
    app.tasks[broker.EVALUATE].recorder = delivery.Recorder(config, slot, judges.status_page)
    TaskPool.watch(judges.status_page)
    _ = app.backend  # looked up at a task's end; a child would import it anew
    # Before every fork the pool collects garbage, which with torch takes 60 ms, and none of this is garbage.
    gc.freeze()
    gc.enable()


def _database(config: Config, slot: Slot) -> Engine:
    """An engine that has met Postgres and holds no connection, as none may be shared with children."""
    engine = store_engine.connect(config.require_database(), application=f"kqueue judge {slot.name}", pool_size=1)
    # What SQLAlchemy learns at the first connection and makes of statements, every child would learn anew, in 40 ms.
    with suppress(DatabaseUnavailable, SchemaMismatch):
        evaluations.warm_up(engine, worker_id=slot.worker_id)
    engine.dispose()
    return engine


@_vital(signals.worker_process_init)
def _prepare_child(**_: Any) -> None:
    """In a child, before it has a task: connect, and touch the memory that a task needs, which is copied then."""
    worker = _require()
    with suppress(DatabaseUnavailable, SchemaMismatch):
        evaluations.warm_up(worker.engine, worker_id=worker.slot.worker_id)


@_vital(signals.worker_ready)
def _report_ready(sender: Any, **_: Any) -> None:
    """In the parent, when it would take its first message: the worker's row must exist before."""
    worker = _require()
    door = socket.socket(fileno=int(os.environ[READY_VARIABLE]))
    door.set_inheritable(False)
    door.sendall(READY)
    word = door.recv(1)
    if not word:
        os._exit(1)  # it was told to stop, or its supervisor is gone
    door.setblocking(False)
    app.tasks[broker.EVALUATE].pool = sender.pool
    keeper = _Keeper(worker, sender, door)
    keeper.obey(word)
    # By the timer: the event loop forgets the sockets that it watches whenever Redis is away.
    sender.timer.call_repeatedly(_LOOK_S, keeper.look)
    sender.timer.call_repeatedly(_LOOK_AT_CHILDREN_S, keeper.look_at_children)


class _Keeper:
    """Looks after a worker's own affairs, in its event loop: the door to the supervisor, fork server and judge."""

    def __init__(self, worker: _Worker, consumer: Any, door: socket.socket) -> None:
        self._worker = worker
        self._consumer = consumer
        self._door = door
        self._stuck = False

    def look(self) -> None:
        """Do what is due."""
        with suppress(BlockingIOError, ConnectionResetError):
            # Told to stop, it hears nothing more.
            if words := self._door.recv(64):
                self.obey(words)
        if not self._worker.judges.alive():
            _log.error("the fork server or the seat is gone: this worker ends, and the supervisor starts another")
            os.kill(os.getpid(), signal.SIGTERM)
        for record in self._worker.judges.status_page.read():
            if record.phase is Phase.SELF_TEST and record.overdue:
                _log.error("the GPU's test hangs: its judge is ended", evaluation=str(record.evaluation_id))
                self._consumer.pool.abort(record.evaluation_id)

    def look_at_children(self) -> None:
        """Tell the supervisor if one that was killed does not die, and when it has."""
        if (stuck := self._consumer.pool.stuck(also_of=self._worker.judges.pid)) is not self._stuck:
            self._stuck = stuck
            with suppress(OSError):
                self._door.sendall(STUCK if stuck else FREE)

    def obey(self, words: bytes) -> None:
        """Take messages, or take none: the last word counts."""
        for lane in self._worker.slot.lanes:
            name = broker.queue(lane).name
            if words[-1:] == GO:
                self._consumer.add_task_queue(name)
            else:
                self._consumer.cancel_task_queue(name)


@_vital(signals.worker_shutdown)
def _stop(sender: Any, **_: Any) -> None:
    """In the parent, at the end of a warm stop."""
    if _worker is not None:
        _worker.judges.stop()
    # Nothing is left to do, and an interpreter that tidies up after Triton complains at length of leaks.
    atexit.register(os._exit, sender.exitcode or 0)
