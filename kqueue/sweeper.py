"""The sweep, which keeps the promise that every accepted evaluation ends. Each fleet sweeps every few seconds.

Postgres holds the truth, so a sweep finds there what Redis, a worker or a producer lost: evaluations whose workers fell
silent, whose producers' patience is over, and whose messages are gone. A sweep is short. Longer work is done in pieces,
one a sweep.

Postgres also decides whose turn it is. Redis holds a window of the next evaluations of each lane, which a sweep fills
and puts in order. Between sweeps :func:`fill` does that alone, when evaluations are submitted or end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import Final
from uuid import UUID

from celery import Celery
from sqlalchemy import Connection, Engine, select, text

from kqueue import broker
from kqueue.errors import BrokerUnavailable, DatabaseUnavailable
from kqueue.store import evaluations, probes, retention, workers
from kqueue.store.engine import translate
from kqueue.store.evaluations import Recorded
from kqueue.store.retention import Pruned

_log = logging.getLogger(__name__)

#: One sweeper at a time in the whole fleet.
_LOCK: Final = 0x6B71_7565_7565_0002
#: One at a time reacts to submissions and ends.
_FILLING: Final = 0x6B71_7565_7565_0003
#: Asks what there is to do. An idle fleet asks this one question every second instead of one for each chore.
_CHORES: Final = select(
    evaluations.ANY_UNFINISHED.label("unfinished"),
    evaluations.ANY_EXPIRED.label("expired"),
    evaluations.ANY_OVERDUE.label("overdue"),
    workers.ANY_SILENT.label("silent"),
)
#: Rows that one statement changes. So many take a moment, however busy the database is.
_BITE: Final = 5000
#: How often a filler looks anew at once, as what it removed may have been sent while it looked.
_FILLS: Final = 2
#: Seconds between two searches for single messages that Redis lost, as it does if a worker dies in the moment in which
#: it takes one. A search reads the windows alone.
LOOK_EVERY_S: Final = 10.0
#: Seconds that a sweep ends evaluations that nobody began in time.
_EXPIRING_S: Final = 0.5
#: Seconds without a heartbeat after which a worker is given up.
_SILENT_S: Final = 90.0
#: Seconds between two bites of pruning. They remove more in a day than any fleet makes, at a negligible load.
_PRUNE_EVERY_S: Final = 5.0
#: Seconds between two looks at probes.
_PROBE_EVERY_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class SweepReport:
    """The result of a sweep.

    Attributes:
        swept: False if another sweeper was at work; nothing else is set then.
        lost: the evaluations whose attempts were ended because their workers fell silent, and what became of each.
        expired: the number of evaluations that were ended because no worker began them in time.
        stopped_workers: the number of workers that were given up as dead.
        missing: the number of messages that Redis should have had and did not.
        published: the number of messages sent.
        pruned: what was removed for its age.
        probes: what probes came to, and what was done about it.
        broker_error: why publishing was broken off; the next sweep tries again.
        idle: True if every evaluation has its verdict, so there is nothing to lose.
    """

    swept: bool
    lost: tuple[tuple[UUID, Recorded], ...] = ()
    expired: int = 0
    stopped_workers: int = 0
    missing: int = 0
    published: int = 0
    pruned: Pruned = field(default_factory=Pruned)
    probes: probes.Step = field(default_factory=probes.Step)
    broker_error: str | None = None
    idle: bool = False


def sweep(
    engine: Engine,
    app: Celery,
    *,
    retry_delay_s: float,
    look_every_s: float = LOOK_EVERY_S,
    silent_after_s: float = _SILENT_S,
    retention_days: float | None = None,
    log_retention_days: float | None = None,
    probe_share: float = 0.0,
) -> SweepReport:
    """Sweep once. Any number of sweepers may run; one works at a time.

    Args:
        engine: the database; two connections are used at once.
        app: what :func:`kqueue.broker.make_app` made.
        retry_delay_s: seconds before a second try.
        look_every_s: seconds between two searches of Redis for all messages. A Redis that was emptied, restarted or
            replaced is noticed at once.
        silent_after_s: seconds without a heartbeat after which a worker is marked as stopped.
        retention_days: days after which finished evaluations are removed; None: never.
        log_retention_days: days after which logs of finished evaluations are emptied; None: never.
        probe_share: probes for each judged evaluation (:mod:`kqueue.store.probes`); 0 submits none.

    Raises:
        DatabaseUnavailable: Postgres cannot be used.
    """
    with _alone(engine, _LOCK) as connection:
        if connection is None:
            return SweepReport(swept=False)
        chores = connection.execute(_CHORES, {"silent_for": timedelta(seconds=silent_after_s)}).one()
        lost = evaluations.expire_leases(engine, retry_delay_s=retry_delay_s) if chores.overdue else []
        expired = _expire(engine) if chores.expired else 0
        stopped = workers.stop_silent(engine, older_than_s=silent_after_s) if chores.silent else 0
        missing = published = 0
        pruned, probed, broker_error = Pruned(), probes.Step(), None
        try:
            missing = _look(engine, app, look_every_s)
            probed = _probe(engine, app, probe_share, silent_after_s)
            if chores.unfinished or probed.submitted:
                published = fill(engine, app)
            pruned = _prune_a_bite(engine, app, retention_days, log_retention_days)
        except BrokerUnavailable as error:
            _log.warning("queued evaluations wait for Redis: %s", error)
            broker_error = str(error)
    idle = not (chores.unfinished or probed.submitted)
    return SweepReport(True, tuple(lost), expired, stopped, missing, published, pruned, probed, broker_error, idle)


def _expire(engine: Engine) -> int:
    """End what has waited too long, for a moment; return how many."""
    deadline, ended = time.monotonic() + _EXPIRING_S, 0
    while (now := evaluations.expire_queued(engine)) and time.monotonic() < deadline:
        ended += now
    return ended + now


def fill(engine: Engine, app: Celery, *, retries: bool = True) -> int:
    """Have Redis hold the messages of each lane's next evaluations, in their order, and no others.

    Any number may do so at once: of those that find the same message missing one sends it.

    Args:
        engine: the database.
        app: what :func:`kqueue.broker.make_app` made.
        retries: also send messages of evaluations that were tried before. A worker may have refused them for another
            one's sake a moment ago, and would again.

    Returns:
        The number of messages sent.

    Raises:
        BrokerUnavailable: Redis cannot be used. What was not sent is sent by the next call.
        DatabaseUnavailable: Postgres cannot be used.
    """
    sent = 0
    for _ in range(_FILLS):
        slots = workers.live_lanes(engine, within_s=_SILENT_S)
        nexts = evaluations.upcoming(engine, slots)
        missing = [
            one.id for lane in nexts.values() for one in lane if not one.published and (retries or not one.attempts)
        ]
        messages = evaluations.publish(engine, missing) if missing else []
        astray = {message.evaluation_id for message in messages}
        try:
            if messages:
                broker.publish(app, messages)
            astray.clear()
            for lane in {*slots, *nexts}:
                astray |= broker.arrange(app, lane, [one.id for one in nexts.get(lane, ())])
        finally:
            _unpublish(engine, astray)
        sent += len(messages)
        if not astray:
            break
    return sent


def _unpublish(engine: Engine, ids: Collection[UUID]) -> int:
    """Record that messages are not in Redis; return how many evaluations that changed."""
    each = list(ids)
    return sum(evaluations.unpublish(engine, each[start : start + _BITE]) for start in range(0, len(each), _BITE))


def fill_alone(engine: Engine, app: Celery) -> bool:
    """As :func:`fill`, without retries; return False if another one is at it, which needs no second."""
    with _alone(engine, _FILLING) as connection:
        if connection is None:
            return False
        fill(engine, app, retries=False)
    return True


def _look(engine: Engine, app: Celery, every_s: float) -> int:
    """If Redis is to be searched, record which messages are missing there; return how many."""
    with broker.unseen(app, every_s=every_s) as unseen:
        if not unseen:
            return 0
        # Read before Redis is: messages that are sent meanwhile are not missed.
        expected = evaluations.published(engine)
        lost = [identity for lane, ids in expected.items() for identity in ids - broker.waiting(app, lane)]
        return _unpublish(engine, lost)


def _probe(engine: Engine, app: Celery, share: float, live_s: float) -> probes.Step:
    """Look at the probes of the fleet's judge, and submit those that are due, if it is time for that."""
    if not broker.turn(app, "probes", every_s=_PROBE_EVERY_S):
        return probes.Step()
    try:
        return probes.step(engine, share=share, live_s=live_s)
    except DatabaseUnavailable as error:
        # Most often a right is missing. The rest of the sweep matters more and goes on.
        _tell_once("probes could not be seen to", str(error))
        return probes.Step()


def _prune_a_bite(
    engine: Engine, app: Celery, retention_days: float | None, log_retention_days: float | None
) -> Pruned:
    """Remove some of what is old enough, if it is time for that."""
    if not broker.turn(app, "prune", every_s=_PRUNE_EVERY_S):
        return Pruned()
    try:
        evaluations.tally(engine)
        return retention.prune(engine, retention_days=retention_days, log_retention_days=log_retention_days)
    except DatabaseUnavailable as error:
        # Most often a right is missing. The rest of the sweep matters more and goes on.
        _tell_once("old evaluations could not be removed", str(error))
        return Pruned()


@lru_cache(maxsize=16)
def _tell_once(what: str, reason: str) -> None:
    """Warn once in a process: every time fails in the same way."""
    _log.warning("%s: %s", what, reason)


@contextmanager
def _alone(engine: Engine, lock: int) -> Generator[Connection | None]:
    """Yield a connection, None if another one holds the lock. No other one gets it within the block."""
    with translate(), engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        alone = bool(connection.scalar(text("SELECT pg_try_advisory_lock(:lock)"), {"lock": lock}))
        try:
            yield connection if alone else None
        finally:
            if alone and not connection.invalidated:
                connection.execute(text("SELECT pg_advisory_unlock(:lock)"), {"lock": lock})
