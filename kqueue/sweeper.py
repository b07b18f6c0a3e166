"""The sweep, which makes sure that every accepted evaluation ends. Each fleet sweeps every few seconds.

Postgres is the record of all evaluations. In it, a sweep finds evaluations that Redis, a worker or a producer lost:
those with silent workers, with an expired queue wait, or without a message. A sweep is short. Longer chores are split
over sweeps.

Postgres also decides the order. Redis holds a window of each lane's next evaluations, which a sweep fills and sorts.
Between sweeps, :func:`fill` does only that when evaluations are submitted or end.
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
from psycopg.errors import LockNotAvailable
from sqlalchemy import Connection, Engine, select, text
from sqlalchemy.exc import OperationalError

from kqueue import broker, registry
from kqueue.config import Config
from kqueue.errors import BrokerUnavailable, DatabaseUnavailable
from kqueue.store import evaluations, retention, workers
from kqueue.store.engine import transaction
from kqueue.store.evaluations import Recorded
from kqueue.store.retention import Pruned

_log = logging.getLogger(__name__)

#: Table whose lock the fleet's one sweeper holds. Producers' logins can take every advisory lock, but not this one.
_SWEEPING: Final = "workers"
#: Table whose lock the one process holds that reacts to submissions and ends.
_FILLING: Final = "gpus"
#: Query that ends sessions of producers' logins that block the fleet.
_RELIEVE: Final = text("SELECT login, reason, ended FROM kqueue_relieve()")
#: Query for all pending chores. An idle fleet sends this one query every second instead of one for each chore.
_CHORES: Final = select(
    evaluations.ANY_UNFINISHED.label("unfinished"),
    evaluations.ANY_EXPIRED.label("expired"),
    evaluations.ANY_EARLY.label("early"),
    evaluations.ANY_OVERDUE.label("overdue"),
    workers.ANY_SILENT.label("silent"),
)
#: Maximum number of rows that one statement changes, so that it is quick even in a busy database.
_BITE: Final = 5000
#: Passes of one :func:`fill`. The second one finds messages that were sent while the first one was removing messages.
_FILLS: Final = 2
#: Seconds between two searches for single lost messages. Redis loses one if a worker dies while it takes it. A search
#: reads only the windows.
LOOK_EVERY_S: Final = 10.0
#: Seconds of a sweep that are spent on ending evaluations that no worker began in time.
_EXPIRING_S: Final = 0.5
#: Seconds without a heartbeat after which a worker is considered dead.
_SILENT_S: Final = 90.0
#: Seconds between two steps of pruning. They remove more in a day than any fleet produces, at a negligible load.
_PRUNE_EVERY_S: Final = 5.0
#: Seconds between two sweeps of a feature.
_DUTY_EVERY_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class SweepReport:
    """The result of a sweep.

    Attributes:
        swept: False if another sweeper held the lock. All other fields then have their defaults.
        lost: evaluations whose attempts were ended because their workers fell silent, each with its new state.
        expired: number of evaluations that were ended because no worker began them in time.
        stopped_workers: number of workers that were marked as dead.
        missing: number of messages that were missing in Redis.
        published: number of messages sent.
        pruned: the rows that were removed for their age.
        broker_error: reason why publishing was aborted. The next sweep tries again.
        idle: True if every evaluation has its verdict, so there is nothing to lose.
    """

    swept: bool
    lost: tuple[tuple[UUID, Recorded], ...] = ()
    expired: int = 0
    stopped_workers: int = 0
    missing: int = 0
    published: int = 0
    pruned: Pruned = field(default_factory=Pruned)
    broker_error: str | None = None
    idle: bool = False


def sweep(
    engine: Engine,
    app: Celery,
    *,
    retry_delay_s: float,
    look_every_s: float = LOOK_EVERY_S,
    silent_after_s: float = _SILENT_S,
    config: Config | None = None,
) -> SweepReport:
    """Sweep once. Any number of sweepers can run, and one works at a time. Two connections are used at once.

    A second attempt begins after ``retry_delay_s`` seconds. Redis is searched for all messages every ``look_every_s``
    seconds, and at once if it was emptied, restarted or replaced. A worker is marked as stopped after
    ``silent_after_s`` seconds without a heartbeat. ``config`` says when ended evaluations are removed and their logs
    emptied, which is never without it, and what features submit.
    """
    with _exclusive(engine, _SWEEPING) as connection:
        if connection is None:
            return SweepReport(swept=False)
        for login, reason, ended in connection.execute(_RELIEVE):
            event = f"a session of the producer's login {login} {reason}"
            if ended:
                _log.warning("%s, and was ended", event)
            else:
                _warn_once(event, "it goes on until pg_signal_backend is granted to the owner of the tables")
        chores = connection.execute(_CHORES, {"silent_for": timedelta(seconds=silent_after_s)}).one()
        if chores.early and (due := evaluations.make_due(engine, most=_BITE)):
            _log.warning("the database's clock was set back: %d evaluations that were due later are due now", due)
        lost = evaluations.expire_leases(engine, retry_delay_s=retry_delay_s) if chores.overdue else []
        expired = _expire(engine) if chores.expired else 0
        stopped = workers.stop_silent(engine, older_than_s=silent_after_s) if chores.silent else 0
        missing = published = 0
        pruned, busy, broker_error = Pruned(), chores.unfinished, None
        try:
            missing = _search(engine, app, look_every_s)
            busy = _do_duties(engine, app, config, silent_after_s) or chores.unfinished
            if busy:
                published = fill(engine, app)
            pruned = _prune_a_bite(engine, app, config)
        except BrokerUnavailable as error:
            _log.warning("queued evaluations wait for Redis: %s", error)
            broker_error = str(error)
    return SweepReport(True, tuple(lost), expired, stopped, missing, published, pruned, broker_error, not busy)


def _expire(engine: Engine) -> int:
    """End evaluations whose queue wait is over, for a limited time. Return their number."""
    deadline, ended = time.monotonic() + _EXPIRING_S, 0
    while (now := evaluations.expire_queued(engine)) and time.monotonic() < deadline:
        ended += now
    return ended + now


def fill(engine: Engine, app: Celery, *, retries: bool = True) -> int:
    """Put the messages of the next evaluations into Redis, remove all other messages, and return the number sent.

    Any number of processes can do so at once: if several find the same message missing, one of them sends it. If Redis
    cannot be used, the next call sends the remaining messages. ``retries`` also sends messages of evaluations that were
    tried before. A worker can have refused them a moment ago in favour of another one, and would refuse them again.
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
    """Record that messages are not in Redis. Return the number of changed evaluations."""
    each = list(ids)
    return sum(evaluations.unpublish(engine, each[start : start + _BITE]) for start in range(0, len(each), _BITE))


def fill_alone(engine: Engine, app: Celery) -> bool:
    """Run :func:`fill` without retries. Return False if another process is running it."""
    with _exclusive(engine, _FILLING) as connection:
        if connection is None:
            return False
        fill(engine, app, retries=False)
    return True


def _search(engine: Engine, app: Celery, every_s: float) -> int:
    """If a search of Redis is due, record the messages that are missing there. Return their number."""
    with broker.unseen(app, every_s=every_s) as unseen:
        if not unseen:
            return 0
        # Read before Redis is searched, so that messages sent meanwhile do not count as missing.
        expected = evaluations.published(engine)
        lost = [identity for lane, ids in expected.items() for identity in ids - broker.waiting(app, lane)]
        return _unpublish(engine, lost)


def _do_duties(engine: Engine, app: Celery, config: Config | None, live_s: float) -> bool:
    """Call the features' sweeps, each if this is this sweeper's turn. Return True if one submitted evaluations."""
    submitted = False
    for name, duty in registry.by_feature("duty").items():
        if broker.turn(app, name, every_s=_DUTY_EVERY_S):
            try:
                submitted |= duty.sweep(engine, config, live_s=live_s)
            except DatabaseUnavailable as error:
                # Most often a privilege is missing. The rest of the sweep matters more and continues.
                _warn_once(f"{name} could not be seen to", str(error))
    return submitted


def _prune_a_bite(engine: Engine, app: Celery, config: Config | None) -> Pruned:
    """Remove some of the expired rows, if this is this sweeper's turn."""
    if not broker.turn(app, "prune", every_s=_PRUNE_EVERY_S):
        return Pruned()
    try:
        evaluations.tally(engine)
        days = (None, None) if config is None else (config.retention_days, config.log_retention_days)
        return retention.prune(engine, retention_days=days[0], log_retention_days=days[1])
    except DatabaseUnavailable as error:
        # Most often a privilege is missing. The rest of the sweep matters more and continues.
        _warn_once("old evaluations could not be removed", str(error))
        return Pruned()


@lru_cache(maxsize=16)
def _warn_once(event: str, reason: str) -> None:
    """Warn once in a process, because each failure has the same cause."""
    _log.warning("%s: %s", event, reason)


@contextmanager
def _exclusive(engine: Engine, table: str) -> Generator[Connection | None]:
    """Yield a connection that holds a table's lock during the block, or None if another process holds it.

    Reading and writing the table go on.
    """
    with transaction(engine) as connection:
        try:
            connection.execute(text(f"LOCK TABLE {table} IN SHARE UPDATE EXCLUSIVE MODE NOWAIT"))
            holder = connection
        except OperationalError as error:
            if not isinstance(error.orig, LockNotAvailable):
                raise
            holder = None
        yield holder
