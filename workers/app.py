"""The Celery application that a slot's worker process runs.

The supervisor (:mod:`workers.fleet`) starts the process, and :mod:`workers.start` makes it ready: torch and
Triton are imported, and the slot's fork server is running. From then on the worker's parent only forks: a
child for each task, which is the judge of one evaluation. The parent never touches CUDA, as a process that
did cannot be forked.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import signal
import socket
import time
import traceback
import warnings
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import structlog
from celery import Task, signals
from celery.platforms import SecurityWarning
from sqlalchemy import Engine

from kqueue import broker, logs
from kqueue.categories import Category
from kqueue.config import Config, load
from kqueue.contract import Outcome
from kqueue.errors import ConfigError, DatabaseUnavailable
from kqueue.store import engine as store_engine
from kqueue.store import evaluations
from kqueue.store.evaluations import Claim, Recorded
from workers import delivery, messages
from workers.blackbox import BlackBox
from workers.slot import READY_VARIABLE, VARIABLE, Slot

if TYPE_CHECKING:
    from workers.sandbox.launch import ForkServer

_log: Any = structlog.get_logger(__name__)

#: How long a judge tries to record its outcome while Postgres is away, in seconds.
_FINISH_PATIENCE_S: Final = 30.0
_FINISH_RETRY_S: Final = 0.5
#: Seconds between looks at the fork server.
_FORK_SERVER_CHECK_S: Final = 0.5
_TRACEBACK_CHARACTERS: Final = 8000


@dataclass(frozen=True, slots=True)
class _Worker:
    """What the parent made before it forked."""

    config: Config
    slot: Slot
    engine: Engine
    blackbox: BlackBox
    forkserver: ForkServer


_worker: _Worker | None = None


class _Evaluate(Task):
    Request = delivery.Request
    recorder: delivery.Recorder | None = None


def _make_app() -> Any:
    lanes = Slot.from_environment().lanes if VARIABLE in os.environ else ("cpu", "gpu")
    return broker.make_app(load(), lanes=lanes)


app = _make_app()
# Celery warns of root. A fleet that is root runs each candidate as somebody else, which others cannot.
warnings.filterwarnings("ignore", category=SecurityWarning)


def preload() -> None:
    """Import what every judge needs, so that children inherit it; torch and Triton are there already."""
    importlib.import_module("workers.judge.run")


def start_forkserver(slot: Slot) -> ForkServer:  # noqa: ARG001
    """The slot's fork server, forked by :mod:`workers.start` before this module was imported."""
    from workers.sandbox import launch

    if launch.started is None:
        raise ConfigError("this process has no fork server: start workers with `python -m workers.fleet`")
    return launch.started


def run_evaluation(claim: Claim, slot: Slot, blackbox: BlackBox, forkserver: ForkServer, engine: Engine) -> Outcome:
    """Judge."""
    from workers.judge.run import evaluate

    return evaluate(claim, slot, blackbox, forkserver, engine)


@app.task(name=broker.EVALUATE, base=_Evaluate)
def evaluate(evaluation_id: str) -> dict[str, Any]:
    """Execute one evaluation; what is returned is what Flower shows.

    Raises:
        DatabaseUnavailable: Postgres was away. The worker's parent sees to the attempt.
    """
    worker = _require()
    claim = evaluations.claim(
        worker.engine, UUID(evaluation_id), worker_id=worker.slot.worker_id, lease_s=worker.config.lease_s
    )
    if claim is None:
        return {"evaluation": evaluation_id, "category": None, "note": "not claimed"}
    worker.blackbox.open(claim.evaluation_id, claim.number)
    outcome = _judge(worker, claim)
    recorded = _finish(worker, claim, outcome)
    worker.blackbox.close()
    return {
        "evaluation": evaluation_id,
        "category": str(outcome.category),
        "blame": str(outcome.category.blame),
        "attempt": claim.number,
        "recorded": recorded.value,
    }


if VARIABLE in os.environ:
    messages.guard(app)


def _judge(worker: _Worker, claim: Claim) -> Outcome:
    try:
        return run_evaluation(claim, worker.slot, worker.blackbox, worker.forkserver, worker.engine)
    except Exception as error:  # noqa: BLE001
        # Faults of candidates and problems come back as outcomes: this one is ours.
        _log.exception("the judge failed", evaluation=str(claim.evaluation_id), attempt=claim.number)
        return Outcome(
            category=Category.JUDGE_ERROR,
            message=f"the judge failed: {type(error).__name__}: {error}"[:500],
            facts={"exception": type(error).__name__},
            evidence={"traceback": traceback.format_exc()[-_TRACEBACK_CHARACTERS:]},
        )


def _finish(worker: _Worker, claim: Claim, outcome: Outcome) -> Recorded:
    deadline = time.monotonic() + _FINISH_PATIENCE_S
    while True:
        try:
            return evaluations.finish(
                worker.engine,
                claim.evaluation_id,
                claim.number,
                outcome,
                written_by="judge",
                retry_delay_s=worker.config.retry_delay_s,
            )
        except DatabaseUnavailable as error:
            if time.monotonic() >= deadline:
                _log.error(
                    "an outcome is lost, as Postgres stayed away: the evaluation will be judged again",
                    evaluation=str(claim.evaluation_id),
                    category=str(outcome.category),
                    reason=str(error),
                )
                raise
            time.sleep(_FINISH_RETRY_S)


def _require() -> _Worker:
    if _worker is None:
        raise ConfigError("this process serves no slot: start workers with `python -m workers.fleet`")
    return _worker


# The worker's life, in order. A handler's exceptions are only logged by Celery, hence SystemExit.


@signals.setup_logging.connect
def _set_up_logging(**_: Any) -> None:
    logs.configure(load(), slot=Slot.from_environment().name if VARIABLE in os.environ else "none")


@signals.worker_init.connect
def _prepare(**_: Any) -> None:
    """In the parent, before it has a pool."""
    global _worker
    try:
        config = load()
        if VARIABLE not in os.environ:
            raise ConfigError(f"{VARIABLE} is not set: start workers with `python -m workers.fleet`")
        slot = Slot.from_environment()
        forkserver = start_forkserver(slot)
        preload()
        forkserver.wait_ready(config.isolation)
        engine = _database(config, slot)
        _worker = _Worker(config, slot, engine, BlackBox(), forkserver)
        app.tasks[broker.EVALUATE].recorder = delivery.Recorder(config, slot, _worker.blackbox)
    except Exception as error:
        _log.exception("the worker cannot start", reason=str(error))
        raise SystemExit(1) from error
    # Before every fork the pool collects garbage, which with torch takes 60 ms, and none of this is garbage.
    gc.collect()
    gc.freeze()


def _database(config: Config, slot: Slot) -> Engine:
    """An engine that has met Postgres and holds no connection, as none may be shared with children."""
    engine = store_engine.connect(config.require_database(), application=f"kqueue judge {slot.name}", pool_size=1)
    # What SQLAlchemy learns at the first connection, every child would learn anew, in 30 ms.
    with suppress(DatabaseUnavailable), store_engine.transaction(engine):
        pass
    engine.dispose()
    return engine


@signals.worker_ready.connect
def _report_ready(sender: Any, **_: Any) -> None:
    """In the parent, when it would take its first message: the worker's row must exist before."""
    worker = _require()
    with socket.socket(fileno=int(os.environ[READY_VARIABLE])) as supervisor:
        supervisor.sendall(b"r")
        if not supervisor.recv(1):
            raise SystemExit("the supervisor did not let this worker in")
    sender.timer.call_repeatedly(_FORK_SERVER_CHECK_S, _check_fork_server, (worker,))


def _check_fork_server(worker: _Worker) -> None:
    if not worker.forkserver.alive():
        _log.error("the fork server is gone: this worker ends, and the supervisor starts another")
        os.kill(os.getpid(), signal.SIGTERM)


@signals.worker_shutdown.connect
def _stop(sender: Any, **_: Any) -> None:
    """In the parent, at the end of a warm stop."""
    if _worker is not None:
        _worker.forkserver.stop()
    # Nothing is left to do, and an interpreter that tidies up after Triton complains at length of leaks.
    atexit.register(os._exit, sender.exitcode or 0)
