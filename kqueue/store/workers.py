"""Workers: their lanes and heartbeats. All times are by the database's clock.

Every function is one transaction and raises :class:`~kqueue.errors.DatabaseUnavailable` if Postgres cannot be used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy import ColumnElement, Engine, Interval, and_, bindparam, case, func, select, text, true, update
from sqlalchemy.dialects.postgresql import insert

from kqueue.limits import LONGEST_LIMIT_S
from kqueue.store import clean
from kqueue.store.engine import transaction
from kqueue.store.models import Attempt, Worker
from kqueue.store.sql import any_uuid, columns, fetch

#: Seconds after the longest hard limit until which leases are renewed. An attempt whose end could not be recorded must
#: not live as long as its worker does.
_OVERTIME_S: Final = 60.0

#: Statement that renews leases. A worker runs one attempt at a time, so only its last one is renewed. Attempts whose
#: rows are locked are skipped, so that a process that froze while it held a row does not block the other workers.
_RENEW: Final = text("""
    UPDATE attempts AS a
    SET lease_until = least(
        now() + make_interval(secs => :lease_s), a.started_at + make_interval(secs => :most_s)
    )
    WHERE a.id IN (
          SELECT free.id FROM attempts AS free
          WHERE free.worker_id = ANY(:ids)
            AND free.ended_at IS NULL
            AND free.id = (SELECT max(last.id) FROM attempts AS last WHERE last.worker_id = free.worker_id)
          FOR UPDATE SKIP LOCKED
      )
""")

_PAUSE: Final = text("""
    UPDATE workers AS w
    SET paused = said.reason
    FROM unnest(CAST(:ids AS uuid[]), CAST(:reasons AS text[])) AS said (id, reason)
    WHERE w.id = said.id AND w.paused IS DISTINCT FROM said.reason
""")

_WAIT: Final = text("""
    UPDATE workers AS w
    SET waits_for = said.holder, waits_since = CASE WHEN said.holder IS NOT NULL THEN coalesce(w.waits_since, now()) END
    FROM unnest(CAST(:ids AS uuid[]), CAST(:holders AS text[])) AS said (id, holder)
    WHERE w.id = said.id AND w.waits_for IS DISTINCT FROM said.holder
""")

#: Statement that records steps. It skips attempts with locked rows too.
_NOTE_STEPS: Final = text("""
    UPDATE attempts AS a
    SET step = said.step
    FROM unnest(CAST(:evaluations AS uuid[]), CAST(:numbers AS int[]), CAST(:steps AS text[]))
        AS said (evaluation_id, number, step)
    WHERE a.evaluation_id = said.evaluation_id
      AND a.number = said.number
      AND a.id IN (
          SELECT free.id FROM attempts AS free
          WHERE free.evaluation_id = ANY(:evaluations) AND free.ended_at IS NULL
          FOR UPDATE SKIP LOCKED
      )
""")

#: SQL condition for a worker without a heartbeat during the interval ``silent_for``, which is a parameter.
_SILENT: Final = and_(
    Worker.stopped_at.is_(None), Worker.heartbeat_at < func.now() - bindparam("silent_for", type_=Interval)
)
#: SQL condition that :func:`stop_silent` would find a worker.
ANY_SILENT: Final = select(Worker.id).where(_SILENT).exists()


@dataclass(frozen=True, slots=True)
class LiveWorker:
    """A live worker.

    Attributes:
        id: id of this start of the worker process.
        name: Celery's node name.
        device: a GPU's UUID, or ``cpu``.
        busy_with: the evaluation that it executes now.
        busy_since: the time at which it began that, UTC.
        step: its current step, named as in ``evidence.durations_s``, if the attempt has run for more than a second.
        paused: the reason why it accepts no evaluations, or None.
        waits_for: the process outside its fleet that holds its device while its evaluation waits.
        waits_since: the time since which it waits, UTC.
    """

    id: UUID
    name: str
    host: str
    pid: int
    lanes: tuple[str, ...]
    device: str
    busy_with: UUID | None
    busy_since: datetime | None
    step: str | None
    paused: str | None
    waits_for: str | None
    waits_since: datetime | None

    def hiding(self, ids: Collection[UUID]) -> LiveWorker:
        """Return the worker without the evaluation that it executes, if that is one of ``ids``."""
        return replace(self, busy_with=None, step=None) if self.busy_with in ids else self


def register(
    engine: Engine,
    *,
    id: UUID,  # noqa: A002
    name: str,
    host: str,
    pid: int,
    lanes: Sequence[str],
    device: str,
    paused: str | None = None,
) -> None:
    """Record that a worker process serves ``lanes``, or why it is paused. A known worker's row is updated."""
    row: dict[str, Any] = {"name": name, "host": host, "pid": pid, "lanes": list(lanes), "device": device}
    row["paused"] = paused
    with transaction(engine) as connection:
        connection.execute(
            insert(Worker)
            .values(id=id, **row)
            .on_conflict_do_update(
                index_elements=[Worker.id], set_=row | {"heartbeat_at": func.now(), "stopped_at": None}
            )
        )


def heartbeat(engine: Engine, ids: Collection[UUID], *, lease_s: float) -> None:
    """Record that the workers ``ids`` are alive, and renew the leases of their attempts by ``lease_s`` seconds.

    A worker that counted as dead counts as alive again.
    """
    with transaction(engine) as connection:
        connection.execute(
            update(Worker).where(Worker.id == any_uuid(ids)).values(heartbeat_at=func.now(), stopped_at=None)
        )
        connection.execute(_RENEW, {"ids": list(ids), "lease_s": lease_s, "most_s": LONGEST_LIMIT_S + _OVERTIME_S})


def pause(engine: Engine, reasons: Mapping[UUID, str | None]) -> None:
    """Record the reasons why workers accept no evaluations. None ends the pause.

    Claims by paused workers are refused.
    """
    with transaction(engine) as connection:
        connection.execute(_PAUSE, {"ids": list(reasons), "reasons": list(reasons.values())})


def wait_for_device(engine: Engine, holders: Mapping[UUID, str | None]) -> None:
    """Record the processes outside the fleet that hold the devices for which workers wait. None ends the wait."""
    with transaction(engine) as connection:
        connection.execute(_WAIT, {"ids": list(holders), "holders": list(holders.values())})


def note_steps(engine: Engine, steps: Mapping[tuple[UUID, int], str | None]) -> None:
    """Record the current steps of running attempts, by evaluation and number."""
    evaluations, numbers = zip(*steps, strict=True)
    names = [None if step is None else clean.text(step) for step in steps.values()]
    parameters = {"evaluations": list(evaluations), "numbers": list(numbers), "steps": names}
    with transaction(engine) as connection:
        connection.execute(_NOTE_STEPS, parameters)


def stop(engine: Engine, id: UUID) -> None:  # noqa: A002
    """Record that a worker process has ended."""
    with transaction(engine) as connection:
        connection.execute(
            update(Worker).where(Worker.id == id, Worker.stopped_at.is_(None)).values(stopped_at=func.now())
        )


def stop_silent(engine: Engine, *, older_than_s: float) -> int:
    """Mark workers as stopped that were silent for more than ``older_than_s`` seconds, and return their number.

    A worker whose row is locked is skipped: it has just sent a heartbeat, and waiting for the lock could deadlock.
    """
    silent = select(Worker.id).where(_SILENT).with_for_update(skip_locked=True)
    statement = update(Worker).where(Worker.id.in_(silent)).values(stopped_at=func.now())
    with transaction(engine) as connection:
        return connection.execute(statement, {"silent_for": timedelta(seconds=older_than_s)}).rowcount


def live(engine: Engine, *, within_s: float) -> list[LiveWorker]:
    """Return the workers with a heartbeat within the last ``within_s`` seconds, by host and name."""
    busy = (
        select(Attempt.evaluation_id, Attempt.started_at, Attempt.step)
        .where(Attempt.worker_id == Worker.id, Attempt.ended_at.is_(None))
        .order_by(Attempt.id.desc())
        .limit(1)
        .lateral()
    )
    # A recorded wait without a running evaluation belongs to an earlier one.
    waits = and_(Worker.waits_for.is_not(None), busy.c.evaluation_id.is_not(None))
    shown = columns(
        LiveWorker,
        busy,
        Worker,
        busy_with=busy.c.evaluation_id,
        busy_since=busy.c.started_at,
        waits_for=case((waits, Worker.waits_for)),
        waits_since=case((waits, func.greatest(Worker.waits_since, busy.c.started_at))),
    )
    query = select(*shown).outerjoin(busy, true()).where(_alive(within_s))
    return fetch(engine, LiveWorker, query.order_by(Worker.host, Worker.name))


def live_lanes(engine: Engine, *, within_s: float) -> dict[str, int]:
    """Return the number of live workers of each lane that has any, including paused ones."""
    with transaction(engine) as connection:
        served = connection.scalars(select(Worker.lanes).where(_alive(within_s)))
        return dict(Counter(lane for lanes in served for lane in lanes))


def _alive(within_s: float) -> ColumnElement[bool]:
    return and_(Worker.stopped_at.is_(None), Worker.heartbeat_at >= func.now() - timedelta(seconds=within_s))
