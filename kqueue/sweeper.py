"""What keeps the promise that every accepted evaluation ends: run every few seconds by each fleet.

Postgres is the truth, so whatever Redis, a worker or a producer lost is found there: evaluations whose
workers fell silent, whose producers' patience is over, and whose messages are gone.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from celery import Celery
from sqlalchemy import Engine, text

from kqueue import broker
from kqueue.errors import BrokerUnavailable
from kqueue.store import evaluations, workers
from kqueue.store.engine import translate
from kqueue.store.evaluations import Recorded, Submitted

_log = logging.getLogger(__name__)

#: One sweeper at a time in the whole fleet.
_LOCK: Final = 0x6B71_7565_7565_0002
#: Evaluations looked at in one go while publishing.
_BATCH: Final = 1000


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What a sweep did.

    Attributes:
        swept: False where another sweeper was at it; then nothing else is set.
        lost: attempts ended because their workers fell silent, and what became of each evaluation.
        expired: evaluations ended because nobody began them in time.
        stopped_workers: workers given up as dead.
        published: messages sent that were missing in Redis.
        broker_error: why publishing was broken off; the next sweep tries again.
    """

    swept: bool
    lost: tuple[tuple[UUID, Recorded], ...] = ()
    expired: int = 0
    stopped_workers: int = 0
    published: int = 0
    broker_error: str | None = None


def sweep(
    engine: Engine, app: Celery, *, retry_delay_s: float, republish_after_s: float = 30.0, silent_after_s: float = 90.0
) -> SweepReport:
    """Do once what is to be done. Any number of sweepers may run; one works at a time.

    Args:
        engine: the database; two connections are used at once.
        app: what :func:`kqueue.broker.make_app` made.
        retry_delay_s: seconds before a second attempt.
        republish_after_s: how long a message may be on its way before it is looked for in Redis.
        silent_after_s: a worker without a heartbeat for so long is marked as stopped.

    Raises:
        DatabaseUnavailable: Postgres cannot be used.
    """
    with _alone(engine) as alone:
        if not alone:
            return SweepReport(swept=False)
        lost = evaluations.expire_leases(engine, retry_delay_s=retry_delay_s)
        expired = evaluations.expire_queued(engine)
        stopped = workers.stop_silent(engine, older_than_s=silent_after_s)
        published, broker_error = _publish_missing(engine, app, republish_after_s)
    return SweepReport(True, tuple(lost), expired, stopped, published, broker_error)


def _publish_missing(engine: Engine, app: Celery, republish_after_s: float) -> tuple[int, str | None]:
    """Send the messages that are not in Redis. Long queues are looked through, not sent a second time."""
    published = 0
    in_redis: dict[str, set[UUID]] = {}
    while due := evaluations.due_for_publishing(engine, older_than_s=republish_after_s, limit=_BATCH):
        confirmed: list[UUID] = []
        try:
            for evaluation in due:
                lane = evaluation.lane
                if lane not in in_redis:
                    in_redis[lane] = broker.waiting(app, lane)
                if evaluation.evaluation_id not in in_redis[lane]:
                    publish(app, evaluation)
                    published += 1
                confirmed.append(evaluation.evaluation_id)
        except BrokerUnavailable as error:
            _log.warning("%d queued evaluations wait for Redis: %s", len(due) - len(confirmed), error)
            return published, str(error)
        finally:
            evaluations.mark_published(engine, confirmed)
        if len(due) < _BATCH:
            break
    return published, None


def publish(app: Celery, evaluation: Submitted) -> None:
    """Send an accepted evaluation's message.

    Raises:
        BrokerUnavailable: Redis did not take it; the next sweep sends it.
    """
    broker.publish(
        app,
        evaluation.evaluation_id,
        evaluation.lane,
        deadlines_s=evaluation.deadlines_s,
        label=evaluation.label,
    )


@contextmanager
def _alone(engine: Engine) -> Generator[bool]:
    """Whether no other sweeper is at work, and none will be within the block."""
    with translate(), engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        alone = bool(connection.scalar(text("SELECT pg_try_advisory_lock(:lock)"), {"lock": _LOCK}))
        try:
            yield alone
        finally:
            if alone and not connection.invalidated:
                connection.execute(text("SELECT pg_advisory_unlock(:lock)"), {"lock": _LOCK})
