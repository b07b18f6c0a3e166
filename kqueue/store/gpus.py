"""GPUs: their states, tests and resets. The database's clock decides.

Every function is one transaction and raises :class:`~kqueue.errors.DatabaseUnavailable` if Postgres cannot be used. The
supervisor acts on what stands here (:mod:`workers.monitor`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection, Engine, Row, Uuid, and_, case, func, literal, null, or_, select, update
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, insert

from kqueue.errors import InvalidRequest
from kqueue.states import GpuState
from kqueue.store import clean
from kqueue.store.engine import transaction
from kqueue.store.models import Attempt, Gpu, ProbePause, Worker
from kqueue.store.sql import any_text

#: Failed tests in a row that take a GPU out of service. One may be chance.
QUARANTINED_AFTER: Final = 2
#: Seconds to the first test that may bring a GPU back, doubled for each one that fails, and the longest.
_FIRST_TEST_S: Final = 10.0
_LAST_TEST_S: Final = 600.0
_REASON_CHARACTERS: Final = 500
#: The condition that a GPU is given evaluations: see :attr:`GpuStatus.paused`.
SERVES: Final = and_(Gpu.state == GpuState.SERVING, Gpu.check_at.is_(None))


@dataclass(frozen=True, slots=True)
class Waiting:
    """An evaluation that waits for memory of a GPU.

    Attributes:
        label: its id, or the name of its slot.
        wanted_bytes: the memory that it waits for.
        since: when it began to wait, UTC.
    """

    label: str
    wanted_bytes: int
    since: datetime


@dataclass(frozen=True, slots=True)
class Memory:
    """A GPU's memory as evaluations have booked it.

    Attributes:
        booked_bytes: all that is booked.
        capacity_bytes: the most that may be booked.
        waiting: the evaluations that wait until theirs fits, the next one first.
    """

    booked_bytes: int
    capacity_bytes: int
    waiting: tuple[Waiting, ...]


@dataclass(frozen=True, slots=True)
class GpuStatus:
    """A GPU that some host's fleet uses.

    Attributes:
        uuid: ``GPU-...``.
        host: the host's name.
        index: NVML's number on that host.
        name: the vendor's name.
        state: whether it may be given evaluations.
        reason: why it is in that state, or is being tested; None if there is no reason.
        since: when it came into that state, UTC.
        failures: tests failed in a row.
        check_at: when it is tested next, UTC. A serving GPU that waits for a test is given nothing either.
        due: True if it is to be tested now.
        reset_at: when its workers are ended at the latest, UTC; None if no reset was asked for.
        reset_due: True if they are to be ended now: nothing runs on it any more, or the time is over.
        facts: what was last seen of it (:mod:`workers.judge.gpu.facts`).
        memory: what its supervisor last saw booked; None if that was nothing.
        seen_at: when its supervisor last reported it, UTC.
        running: the evaluations that its workers execute.
    """

    uuid: str
    host: str
    index: int
    name: str
    state: GpuState
    reason: str | None
    since: datetime
    failures: int
    check_at: datetime | None
    due: bool
    reset_at: datetime | None
    reset_due: bool
    facts: dict[str, Any]
    memory: Memory | None
    seen_at: datetime
    running: tuple[UUID, ...]

    @property
    def paused(self) -> str | None:
        """Why its workers take no evaluations; None if they do."""
        if self.state == GpuState.SERVING and self.check_at is None:
            return None
        what = "is being tested" if self.state == GpuState.SERVING else f"is {self.state}"
        return f"GPU {self.index} {what}" + (f": {self.reason}" if self.reason else "")

    @property
    def is_left_alone(self) -> bool:
        """True if it is quarantined and no test decides on that: only an operator's :func:`resume` ends it."""
        return self.state == GpuState.QUARANTINED and self.check_at is None and self.reset_at is None


def register(engine: Engine, *, host: str, index: int, uuid: str, name: str) -> None:
    """Record that a host's fleet uses a GPU. The state of a known one stays: drained is drained."""
    row: dict[str, Any] = {"host": host, "index": index, "name": name}
    with transaction(engine) as connection:
        connection.execute(
            insert(Gpu)
            .values(uuid=uuid, **row)
            .on_conflict_do_update(index_elements=[Gpu.uuid], set_=row | {"seen_at": func.now()})
        )


def see(engine: Engine, facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Record the facts of GPUs that are seen, by UUID."""
    with transaction(engine) as connection:
        for uuid, known in facts.items():
            connection.execute(
                update(Gpu)
                .where(Gpu.uuid == uuid)
                .values(seen_at=func.now(), facts=literal(clean.json(dict(known)), JSONB))
            )


def see_memory(
    engine: Engine,
    uuid: str,
    *,
    booked_bytes: int,
    capacity_bytes: int | None,
    waiting: Sequence[tuple[str, int, float]],
) -> None:
    """Record how much of a GPU's memory is booked, and who waits for some.

    Args:
        engine: the database.
        uuid: the GPU.
        booked_bytes: all that is booked.
        capacity_bytes: the most that may be booked; None if nobody books.
        waiting: label, wanted bytes, and seconds waited of each evaluation that waits, the next one first.
    """
    with transaction(engine) as connection:
        memory: Any = null()
        if capacity_bytes is not None:
            now = connection.scalar(select(func.now()))
            assert now is not None
            waits = [
                {
                    "label": clean.text(label),
                    "wanted_bytes": wanted_bytes,
                    "since": (now - timedelta(seconds=seconds)).isoformat(),
                }
                for label, wanted_bytes, seconds in waiting
            ]
            known = {"booked_bytes": booked_bytes, "capacity_bytes": capacity_bytes, "waiting": waits}
            memory = literal(known, JSONB)
        connection.execute(update(Gpu).where(Gpu.uuid == uuid).values(memory=memory))


def find(engine: Engine, *, uuids: Collection[str] | None = None, host: str | None = None) -> list[GpuStatus]:
    """Return GPUs, ordered by host and index: all, or only those with these UUIDs or of this host."""
    with transaction(engine) as connection:
        return _find(connection, uuids=uuids, host=host)


def resolve(engine: Engine, named: str, *, host: str) -> GpuStatus:
    """Return the GPU that an operator means.

    Args:
        engine: the database.
        named: its index on ``host``, or its UUID or the beginning of that.
        host: whose index.

    Raises:
        InvalidRequest: none, or more than one.
    """
    known = find(engine)
    if named.isdigit():
        found = [gpu for gpu in known if gpu.host == host and gpu.index == int(named)]
    else:
        found = [gpu for gpu in known if gpu.uuid.lower().startswith(named.lower())]
    if len(found) != 1:
        listed = ", ".join(f"{gpu.index} on {gpu.host} ({gpu.uuid})" for gpu in found or known) or "none"
        what = "more than one GPU" if found else f"no GPU of {host}" if named.isdigit() else "no GPU"
        raise InvalidRequest(f"{what} is named by {named}; known are: {listed}")
    return found[0]


def drain(engine: Engine, uuid: str, *, reason: str | None) -> None:
    """Give a GPU no more evaluations until it is resumed. What runs on it goes on to its end."""
    with transaction(engine) as connection:
        _move(connection, uuid, GpuState.DRAINED, reason, check_at=None)


def resume(engine: Engine, uuid: str) -> None:
    """Give a drained GPU evaluations again. One whose last test failed is tested first, at once."""
    with transaction(engine) as connection:
        healthy = connection.scalar(select(Gpu.failures == 0).where(Gpu.uuid == uuid))
        if healthy:
            _move(connection, uuid, GpuState.SERVING, None, check_at=None)
        else:
            reason = connection.scalar(select(Gpu.reason).where(Gpu.uuid == uuid))
            _move(connection, uuid, GpuState.QUARANTINED, reason, check_at=func.now())


def quarantine(connection: Connection, uuid: str, *, reason: str) -> None:
    """Within the caller's transaction, take a GPU out of service until an operator resumes it. No test does.

    A GPU that an operator drained stays drained.

    Args:
        connection: the transaction.
        uuid: the GPU.
        reason: why, in one line.
    """
    state = connection.scalar(select(Gpu.state).where(Gpu.uuid == uuid).with_for_update())
    if state is not None and state != GpuState.DRAINED:
        _move(connection, uuid, GpuState.QUARANTINED, reason, check_at=None)


def suspect(connection: Connection, uuid: str, *, reason: str, failed: bool) -> None:
    """Within the caller's transaction, ask the GPU's supervisor to test it now.

    Args:
        connection: the transaction.
        uuid: the GPU; a device that is none is passed over.
        reason: what happened, in one line.
        failed: True if that was a failed test, False if it was a sign that something is wrong.
    """
    connection.execute(
        update(Gpu)
        .where(Gpu.uuid == uuid, Gpu.state == GpuState.SERVING)
        .values(
            check_at=func.now(),
            reason=clean.text(reason)[:_REASON_CHARACTERS],
            failures=func.greatest(Gpu.failures, int(failed)),
        )
    )


def ask_for_test(engine: Engine, uuid: str, *, reason: str, failed: bool = False) -> None:
    """:func:`suspect` in a transaction of its own."""
    with transaction(engine) as connection:
        suspect(connection, uuid, reason=reason, failed=failed)


def reset(engine: Engine, uuid: str, *, reason: str, grace_s: float) -> bool:
    """Take a GPU out of service, have its workers restarted, and return it to service when it passes a test.

    A GPU that an operator drained is tested too, and stays drained whatever the result. One that :func:`quarantine`
    took out of service stays as it is: it may pass every test.

    Args:
        engine: the database.
        uuid: the GPU, whatever its state.
        reason: who asked, in one line.
        grace_s: seconds that its evaluations may take to end. Then they are broken off, and done again elsewhere.

    Returns:
        False if nothing was changed, as only :func:`resume` may.
    """
    with transaction(engine) as connection:
        connection.execute(select(Gpu.uuid).where(Gpu.uuid == uuid).with_for_update())
        known = _find(connection, uuids=[uuid], host=None)
        if any(gpu.is_left_alone for gpu in known):
            return False
        if all(gpu.state != GpuState.DRAINED for gpu in known):
            _move(connection, uuid, GpuState.QUARANTINED, reason, check_at=None)
        connection.execute(
            update(Gpu).where(Gpu.uuid == uuid).values(reset_at=func.now() + timedelta(seconds=grace_s), check_at=None)
        )
        return True


def test_after_reset(engine: Engine, uuid: str) -> None:
    """Record that a GPU's workers have ended, as a reset asked for: it is due for a test."""
    with transaction(engine) as connection:
        connection.execute(
            update(Gpu).where(Gpu.uuid == uuid, Gpu.reset_at.is_not(None)).values(reset_at=None, check_at=func.now())
        )


def record_pass(engine: Engine, uuid: str) -> None:
    """Record a passed test: the GPU serves, unless an operator has drained it."""
    with transaction(engine) as connection:
        row = connection.execute(
            select(Gpu.state, Gpu.reset_at, Gpu.check_at).where(Gpu.uuid == uuid).with_for_update()
        ).first()
        _count(connection, uuid, failures=0)
        if row is not None and _left_to_tests(row):
            _move(connection, uuid, GpuState.SERVING, None, check_at=None)


def record_failure(engine: Engine, uuid: str, *, reason: str) -> GpuStatus | None:
    """Record a failed test. The second in a row takes the GPU out of service; it is tested again at growing intervals.

    Returns:
        The GPU as it is now, None if its row is gone.
    """
    with transaction(engine) as connection:
        row = connection.execute(
            select(Gpu.state, Gpu.failures, Gpu.reset_at, Gpu.check_at).where(Gpu.uuid == uuid).with_for_update()
        ).first()
        if row is None:
            return None
        failures = row.failures + 1
        _count(connection, uuid, failures=failures)
        if _left_to_tests(row):
            again_s = min(_FIRST_TEST_S * 2 ** max(failures - QUARANTINED_AFTER, 0), _LAST_TEST_S)
            if row.state == GpuState.QUARANTINED or failures >= QUARANTINED_AFTER:
                _move(connection, uuid, GpuState.QUARANTINED, reason, check_at=func.now() + timedelta(seconds=again_s))
            else:
                _move(connection, uuid, GpuState.SERVING, reason, check_at=func.now())
        [known] = _find(connection, uuids=[uuid], host=None)
        return known


def _count(connection: Connection, uuid: str, *, failures: int) -> None:
    """Count a test. A drained GPU was tested for a reset, and is not tested again."""
    check_at = case((Gpu.state == GpuState.DRAINED, null()), else_=Gpu.check_at)
    connection.execute(update(Gpu).where(Gpu.uuid == uuid).values(failures=failures, check_at=check_at))


def _left_to_tests(row: Row[*tuple[Any, ...]]) -> bool:
    """Return True if a test decides on a GPU's state.

    None does while an operator has drained it, while a reset is under way, or after :func:`quarantine`.
    """
    left_alone = row.state == GpuState.QUARANTINED and row.check_at is None
    return row.state != GpuState.DRAINED and row.reset_at is None and not left_alone


def postpone(engine: Engine, uuid: str, *, reason: str, seconds: float) -> None:
    """Record that a test could not be made. It is due again later, and nothing else changes."""
    with transaction(engine) as connection:
        connection.execute(
            update(Gpu)
            .where(Gpu.uuid == uuid, Gpu.check_at.is_not(None))
            .values(
                reason=case((Gpu.state == GpuState.DRAINED, Gpu.reason), else_=clean.text(reason)[:_REASON_CHARACTERS]),
                check_at=func.now() + timedelta(seconds=seconds),
            )
        )


def _move(connection: Connection, uuid: str, state: GpuState, reason: str | None, *, check_at: Any) -> None:
    reason = None if reason is None else clean.text(reason)[:_REASON_CHARACTERS]
    connection.execute(
        update(Gpu)
        .where(Gpu.uuid == uuid)
        .values(
            state=state,
            reason=reason,
            check_at=check_at,
            reset_at=None,
            since=case((Gpu.state == state, Gpu.since), else_=func.now()),
        )
    )
    if state == GpuState.SERVING:
        # Whatever probes had taken it out of service for, it was put back.
        paused = update(ProbePause).where(ProbePause.device == uuid, ProbePause.resumed_at.is_(None))
        connection.execute(paused.values(resumed_at=func.now()))
    else:
        # At once, so that no retry is kept for its workers and all who look are told. Claims ask the GPU's own row.
        # The supervisor lifts it.
        [gpu] = _find(connection, uuids=[uuid], host=None)
        connection.execute(
            update(Worker).where(Worker.device == uuid, Worker.stopped_at.is_(None)).values(paused=gpu.paused)
        )


def _find(connection: Connection, *, uuids: Collection[str] | None, host: str | None) -> list[GpuStatus]:
    running = (
        select(func.coalesce(func.array_agg(Attempt.evaluation_id), literal([], ARRAY(Uuid))))
        .join(Worker, Worker.id == Attempt.worker_id)
        .where(Worker.device == Gpu.uuid, Attempt.ended_at.is_(None))
        .scalar_subquery()
    )
    due = and_(Gpu.check_at.is_not(None), Gpu.check_at <= func.now())
    reset_due = and_(Gpu.reset_at.is_not(None), or_(Gpu.reset_at <= func.now(), func.cardinality(running) == 0))
    labels = (due.label("due"), reset_due.label("reset_due"), running.label("running"))
    query = select(*Gpu.__table__.columns, *labels)
    if uuids is not None:
        query = query.where(Gpu.uuid == any_text(uuids))
    if host is not None:
        query = query.where(Gpu.host == host)
    rows = connection.execute(query.order_by(Gpu.host, Gpu.index)).mappings()
    found: list[GpuStatus] = []
    for row in rows:
        fields: dict[str, Any] = dict(row) | {"state": GpuState(row["state"]), "running": tuple(row["running"])}
        fields["memory"] = _memory(row["memory"])
        found.append(GpuStatus(**fields))
    return found


def _memory(known: Mapping[str, Any] | None) -> Memory | None:
    if known is None:
        return None
    waiting = tuple(
        Waiting(label=one["label"], wanted_bytes=one["wanted_bytes"], since=datetime.fromisoformat(one["since"]))
        for one in known["waiting"]
    )
    return Memory(booked_bytes=known["booked_bytes"], capacity_bytes=known["capacity_bytes"], waiting=waiting)
