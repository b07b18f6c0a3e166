"""The Celery application that a slot's worker process runs.

The supervisor (:mod:`workers.fleet`) starts the process. :mod:`workers.start` imports torch and Triton and forks the
slot's fork server and judge supervisor. From then on the worker's parent only forks task processes. A task process
claims an evaluation, waits until the slot's judge has judged it, and records the outcome. It takes further evaluations
as long as static checks alone decide them.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import os
import signal
import socket
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
from kqueue.categories import Blame, Category
from kqueue.config import Config, load
from kqueue.contract import Outcome, Phase
from kqueue.errors import ConfigError, DatabaseUnavailable, InvalidRequest, SchemaMismatch
from kqueue.registry import attached
from kqueue.states import Writer
from kqueue.store import engine as store_engine
from kqueue.store import evaluations, gpus
from kqueue.store.evaluations import Claim, Recorded
from kqueue.store.models import LOCAL
from workers import delivery, messages
from workers.backend import StoredBackend, patiently
from workers.judge import api, deaths
from workers.judge.api import Judges
from workers.judge.backend import InMemoryBackend
from workers.pool import TaskPool
from workers.slot import FREE, GO, READY, READY_VARIABLE, STUCK, VARIABLE, Slot

_log: Any = structlog.get_logger(__name__)

#: Number of evaluations that a child finishes by static checks before it is recycled.
_MOST_STATIC: Final = 500
#: Seconds between checks of the supervisor's orders, the fork server and the judge.
_CHECK_S: Final = 0.2
#: Seconds between checks for children that do not die. These cost more, and a child counts as stuck only after seconds.
_CHECK_CHILDREN_S: Final = 1.0


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


app: Any = broker.make_app(
    load(),
    lanes=Slot.from_environment().lanes if VARIABLE in os.environ else ("cpu", "gpu"),
    patience_s=broker.CONSUMER_PATIENCE_S,
)
# Celery warns of root. But only a fleet that runs as root can run each candidate under another uid.
warnings.filterwarnings("ignore", category=SecurityWarning)


def start_judges(slot: Slot) -> Judges:  # noqa: ARG001
    """Return the slot's judges. :mod:`workers.start` forked their supervisor before this module was imported."""
    if api.started is None:
        raise ConfigError("this process has no judges: start workers with `kqueue worker`")
    return api.started


def run_evaluation(claim: Claim, slot: Slot, judges: Judges, engine: Engine) -> Outcome:
    """Judge a claimed evaluation with the slot's judge."""
    try:
        request = claim.request
    except InvalidRequest as error:
        return Outcome(category=Category.INVALID_REQUEST, message=str(error))
    config = load()
    own = replace(slot, gpu_shared=config.gpu_shared, alone=claim.alone)
    if slot.peers and request.ranks > 1:
        serving = {gpu.uuid for gpu in gpus.find(engine, uuids=slot.peers) if gpu.paused is None}
        own = replace(own, peers=tuple(uuid for uuid in slot.peers if uuid in serving))
    backend = StoredBackend(engine, claim.attempt_id, claim.owner, judges.conditions if config.reuse else None)
    caches = "" if claim.owner == LOCAL else hashlib.sha256(claim.owner.encode()).hexdigest()
    return judges.judge(request, own, backend, caches)


@app.task(name=broker.EVALUATE, base=_Evaluate)
def evaluate(evaluation_id: str) -> dict[str, Any]:
    """Execute one evaluation. Flower shows the returned object.

    The child is recycled after an evaluation that ran code, and after any error. It takes another task if static
    checks decided the evaluation, or if it claimed none.

    Raises:
        DatabaseUnavailable, SchemaMismatch: Postgres was away for long, or has another version's schema. The
            worker's parent closes the attempt.
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
    with bound_contextvars(attempt=claim.number, owner=claim.owner):
        return _process(worker, claim)


def _process(worker: _Worker, claim: Claim) -> dict[str, Any]:
    """Judge a claimed evaluation and record the outcome."""
    _log.debug("an attempt begins", lane=claim.lane, alone=claim.alone)
    outcome, writer = _outcome_of(lambda: run_evaluation(claim, worker.slot, worker.judges, worker.engine))
    evidence = outcome.evidence
    if evidence.traceback is not None:
        _log.error("the judge failed", traceback=evidence.traceback)
    if claim.alone:
        outcome = outcome.model_copy(update={"evidence": evidence.model_copy(update={"alone": True})})
    _child.finished += 1
    if outcome.category.blame is Blame.FLEET or _child.finished >= _MOST_STATIC:
        worker.judges.status_page.use()
    if outcome.category.blame is Blame.FLEET and not worker.judges.work() and os.getppid() == worker.pid:
        # The signal is sent before this task ends. The next evaluations would fail for the same reason, and each
        # would use up an attempt.
        os.kill(worker.pid, signal.SIGTERM)
    recorded = _finish(worker, claim, outcome, writer)
    worker.judges.status_page.close()
    _log.info("an attempt ended", category=str(outcome.category), recorded=recorded.value, lane=claim.lane)
    _count(worker, outcome)
    return {
        "evaluation": str(claim.evaluation_id),
        "category": str(outcome.category),
        "blame": str(outcome.category.blame),
        "attempt": claim.number,
        "recorded": recorded.value,
    }


def _count(worker: _Worker, outcome: Outcome) -> None:
    """Count consecutive failures. After many, end the worker if an evaluation of the fleet's own fails too.

    A request can choose its failure, so this alone is no evidence against the worker. Without a feature that has such
    an evaluation, the worker goes on.
    """
    failures, facts = worker.judges.status_page.failures, outcome.facts
    # Clocks, missing tools and other versions are no fault of this worker.
    other = outcome.category is Category.TIMING_UNSTABLE or facts.missing or facts.exception == SchemaMismatch.__name__
    failures[0] = failures[0] + 1 if outcome.blame is Blame.FLEET and not other else 0
    if failures[0] < delivery.MOST_FAILURES or not (duties := attached("duty")):
        return
    request = duties[0].honest(worker.slot.lanes[0])
    probed, _ = _outcome_of(lambda: worker.judges.judge(request, worker.slot, InMemoryBackend(), ""))
    if probed.blame is not Blame.FLEET:
        failures[0] = 0
        _log.warning("many failures, but the fleet's own evaluation was judged: this worker goes on")
    elif os.getppid() == worker.pid:
        _log.error("many failures, and the fleet's own evaluation failed too: this worker ends", reason=probed.message)
        os.kill(worker.pid, signal.SIGTERM)


if VARIABLE in os.environ:
    messages.guard(app)


@dataclass(slots=True)
class _Child:
    """The state of this child: the number of evaluations that it has finished."""

    finished: int = 0


_child = _Child()


def _claim(worker: _Worker, evaluation_id: UUID) -> Claim | None:
    """Begin an attempt. Return None if another worker has begun it, or it must not begin now."""

    def claim(again: bool) -> Claim | None:
        own, delay_s = worker.slot.worker_id, worker.config.retry_delay_s
        found = evaluations.claim(worker.engine, evaluation_id, worker_id=own, lease_s=worker.config.lease_s)
        if found is None and again:
            # The claim can have succeeded although its connection broke. Then this worker holds the evaluation.
            told = "the answer to the claim was lost: nothing was begun"
            evaluations.lose_worker(
                worker.engine, own, evaluation_id=evaluation_id, retry_delay_s=delay_s, message=told, handed_back=True
            )
        return found

    return patiently(worker.engine, claim)


def _outcome_of(judge: Callable[[], Outcome]) -> tuple[Outcome, Writer]:
    """Return the outcome and its writer: the judge, or this worker if the judge died."""
    try:
        return deaths.outcome_of(judge), Writer.JUDGE
    except deaths.JudgeDied as died:
        _log.warning("the judge died", reason=died.outcome.message)
        return died.outcome, Writer.WORKER


def _finish(worker: _Worker, claim: Claim, outcome: Outcome, writer: Writer) -> Recorded:
    key, delay_s = (claim.evaluation_id, claim.number), worker.config.retry_delay_s
    try:
        return patiently(
            worker.engine,
            lambda _: evaluations.finish(worker.engine, *key, outcome, written_by=writer, retry_delay_s=delay_s),
        )
    except (DatabaseUnavailable, SchemaMismatch) as error:
        _log.error(
            "an outcome is lost because Postgres stayed away: the evaluation will be judged again",
            category=str(outcome.category),
            reason=str(error),
        )
        raise


def _require() -> _Worker:
    if _worker is None:
        raise ConfigError("this process serves no slot: start workers with `kqueue worker`")
    return _worker


# The worker's life, in order.

#: Process id of the worker's parent, which imports this module.
_PARENT: Final = os.getpid()


def _vital(when: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Connect a handler to a Celery signal. Celery only logs a handler's exception, so this ends the worker for it."""

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
    """Prepare the parent before it has a pool."""
    global _worker
    config = load()
    if VARIABLE not in os.environ:
        raise ConfigError(f"{VARIABLE} is not set: start workers with `kqueue worker`")
    slot = Slot.from_environment()
    judges = start_judges(slot)
    judges.wait_ready(config.isolation)
    conditions = judges.conditions if config.reuse else "none"  # computed here, once for all children
    _log.debug("conditions of verdicts in addition to the environment", conditions=conditions)
    _worker = _Worker(config, slot, _database(config, slot), judges, os.getpid())
    app.tasks[broker.EVALUATE].recorder = delivery.Recorder(config, slot, judges.status_page)
    TaskPool.watch(judges.status_page)
    _ = app.backend  # used at a task's end, where every child would import it again
    # The pool collects garbage before every fork. With torch's objects, none of which is garbage, that takes 60 ms.
    gc.freeze()
    gc.enable()


def _database(config: Config, slot: Slot) -> Engine:
    """Return an engine that has connected once, but holds no connection, because children must not share one."""
    engine = store_engine.connect(config.require_database(), application=f"kqueue judge {slot.name}", pool_size=1)
    # SQLAlchemy inspects the server at its first connection and compiles statements. That would take each child 40 ms.
    with suppress(DatabaseUnavailable, SchemaMismatch):
        evaluations.warm_up(engine, worker_id=slot.worker_id)
    engine.dispose()
    return engine


@_vital(signals.worker_process_init)
def _prepare_child(**_: Any) -> None:
    """Connect in a child before its first task. This also copies the shared memory pages that a task writes to."""
    worker = _require()
    with suppress(DatabaseUnavailable, SchemaMismatch):
        evaluations.warm_up(worker.engine, worker_id=worker.slot.worker_id)


@_vital(signals.worker_ready)
def _report_ready(sender: Any, **_: Any) -> None:
    """Report to the supervisor in the parent, before its first message: the worker's row must exist by then."""
    worker = _require()
    supervisor = socket.socket(fileno=int(os.environ[READY_VARIABLE]))
    supervisor.set_inheritable(False)
    supervisor.sendall(READY)
    order = supervisor.recv(1)
    if not order:
        os._exit(1)  # the supervisor stops this worker, or is gone
    supervisor.setblocking(False)
    app.tasks[broker.EVALUATE].pool = sender.pool
    watchdog = _Watchdog(worker, sender, supervisor)
    watchdog.obey(order)
    # Timers, because the event loop forgets the sockets that it watches whenever Redis is away.
    sender.timer.call_repeatedly(_CHECK_S, watchdog.check)
    sender.timer.call_repeatedly(_CHECK_CHILDREN_S, watchdog.check_children)


class _Watchdog:
    """Periodic checks of the supervisor's orders, the fork server, the judge and the children, in the event loop."""

    def __init__(self, worker: _Worker, consumer: Any, supervisor: socket.socket) -> None:
        self._worker = worker
        self._consumer = consumer
        self._supervisor = supervisor
        self._stuck = False

    def check(self) -> None:
        """Obey the supervisor's orders, end a worker without judges, and end judges whose GPU self-test hangs."""
        with suppress(BlockingIOError, ConnectionResetError):
            # The supervisor closes the socket when it stops this worker. Then there is nothing to read.
            if orders := self._supervisor.recv(64):
                self.obey(orders)
        if not self._worker.judges.alive():
            _log.error(
                "the fork server or the judge supervisor is gone: this worker ends, and the supervisor starts another"
            )
            os.kill(os.getpid(), signal.SIGTERM)
        for record in self._worker.judges.status_page.read():
            if record.phase is Phase.SELF_TEST and record.overdue:
                _log.error("the GPU self-test hangs: its judge is ended", evaluation=str(record.evaluation_id))
                self._consumer.pool.abort(record.evaluation_id)

    def check_children(self) -> None:
        """Report to the supervisor when a killed child does not die, and again when it is gone."""
        if (stuck := self._consumer.pool.stuck(also_of=self._worker.judges.pid)) is not self._stuck:
            self._stuck = stuck
            with suppress(OSError):
                self._supervisor.sendall(STUCK if stuck else FREE)

    def obey(self, orders: bytes) -> None:
        """Start or stop taking messages. Only the last order counts."""
        for lane in self._worker.slot.lanes:
            name = broker.queue(lane).name
            if orders[-1:] == GO:
                self._consumer.add_task_queue(name)
            else:
                self._consumer.cancel_task_queue(name)


@_vital(signals.worker_shutdown)
def _stop(sender: Any, **_: Any) -> None:
    """Stop the judges in the parent at the end of a warm stop."""
    if _worker is not None:
        _worker.judges.stop()
    # Nothing is left to do, and an interpreter that cleans up after Triton prints many warnings of leaks.
    atexit.register(os._exit, sender.exitcode or 0)
