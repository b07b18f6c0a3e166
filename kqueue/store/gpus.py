"""GPUs: their states, self-tests and resets. All times are by the database's clock.

Every function is one transaction and raises :class:`~kqueue.errors.DatabaseUnavailable` if Postgres cannot be used. The
supervisor acts on these rows (:mod:`workers.monitor`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy import ColumnElement, Connection, Engine, Row, Uuid, and_, case, func, literal, null, select, update
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, insert

from kqueue.errors import InvalidRequest
from kqueue.states import GpuState
from kqueue.store import clean
from kqueue.store.engine import transaction
from kqueue.store.models import Attempt, Gpu, ProbePause, Worker
from kqueue.store.sql import any_text, columns, read

#: Number of consecutive failed self-tests that take a GPU out of service. One failure can be chance.
QUARANTINED_AFTER: Final = 2
#: Seconds to the first self-test that can return a GPU to service. The interval doubles with each failure.
_FIRST_TEST_S: Final = 10.0
#: Maximum interval in seconds between self-tests.
_LAST_TEST_S: Final = 600.0
_REASON_CHARACTERS: Final = 500
#: SQL condition for a GPU that accepts evaluations (:attr:`GpuStatus.paused`).
SERVES: Final = and_(Gpu.state == GpuState.SERVING, Gpu.check_at.is_(None))


@dataclass(frozen=True, slots=True)
class Waiting:
    """An evaluation that waits for GPU memory.

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
    """The reserved memory of a GPU.

    Attributes:
        booked_bytes: the sum of all reservations.
        capacity_bytes: the maximum of that sum.
        waiting: the evaluations that wait for a reservation, the next one first.
    """

    booked_bytes: int
    capacity_bytes: int
    waiting: tuple[Waiting, ...]


@dataclass(frozen=True, slots=True)
class GpuStatus:
    """A GPU that a host's fleet uses.

    Attributes:
        uuid: ``GPU-...``.
        index: NVML's index on that host.
        name: the vendor's name.
        state: the state, which decides if it accepts evaluations.
        reason: the reason for its state or self-test, or None.
        since: when it entered that state, UTC.
        failures: number of consecutive failed self-tests.
        check_at: time of the next self-test, UTC. Until then a serving GPU accepts no evaluations either.
        due: True if the self-test is due now.
        reset_at: latest time at which its workers are ended for a reset, UTC. None if no reset was requested.
        reset_due: True if they are to be ended now, because nothing runs on the GPU or the time has passed.
        facts: the last facts about it (:mod:`workers.judge.gpu.facts`).
        memory: the reservations last reported by its supervisor, or None.
        seen_at: time of its supervisor's last report, UTC.
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
        """The reason why its workers accept no evaluations, or None if they do."""
        if self.state == GpuState.SERVING and self.check_at is None:
            return None
        condition = "is being tested" if self.state == GpuState.SERVING else f"is {self.state}"
        return f"GPU {self.index} {condition}" + (f": {self.reason}" if self.reason else "")

    def hiding(self, ids: Collection[UUID]) -> GpuStatus:
        """Return the GPU without these evaluations."""
        running, names = tuple(one for one in self.running if one not in ids), set(map(str, ids))
        waits = self.memory.waiting if self.memory else ()
        waiting = tuple(one if one.label not in names else replace(one, label="another") for one in waits)
        return replace(self, running=running, memory=self.memory and replace(self.memory, waiting=waiting))

    @property
    def is_left_alone(self) -> bool:
        """True if only an operator's :func:`resume` ends its quarantine, because no self-test or reset is planned."""
        return self.state == GpuState.QUARANTINED and self.check_at is None and self.reset_at is None


def register(engine: Engine, *, host: str, index: int, uuid: str, name: str) -> None:
    """Record that a host's fleet uses a GPU. The state of a known GPU is unchanged, so a drained one stays drained."""
    row: dict[str, Any] = {"host": host, "index": index, "name": name}
    with transaction(engine) as connection:
        connection.execute(
            insert(Gpu)
            .values(uuid=uuid, **row)
            .on_conflict_do_update(index_elements=[Gpu.uuid], set_=row | {"seen_at": func.now()})
        )


def see(engine: Engine, facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Record the current facts of GPUs, by UUID."""
    with transaction(engine) as connection:
        for uuid, of_gpu in facts.items():
            _change(connection, uuid, seen_at=func.now(), facts=literal(clean.json(dict(of_gpu)), JSONB))


def see_memory(
    engine: Engine,
    uuid: str,
    *,
    booked_bytes: int,
    capacity_bytes: int | None,
    waiting: Sequence[tuple[str, int, float]],
) -> None:
    """Record the sum of all reservations of a GPU's memory, its maximum if there is any, and the waiting evaluations.

    Of each waiting evaluation ``waiting`` has label, requested bytes and seconds waited, the next one first.
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
            memory = literal({"booked_bytes": booked_bytes, "capacity_bytes": capacity_bytes, "waiting": waits}, JSONB)
        _change(connection, uuid, memory=memory)


def find(engine: Engine, *, uuids: Collection[str] | None = None, host: str | None = None) -> list[GpuStatus]:
    """Return GPUs, ordered by host and index: all, or only those with these UUIDs or on this host."""
    with transaction(engine) as connection:
        return _find(connection, uuids=uuids, host=host)


def resolve(engine: Engine, named: str, *, host: str) -> GpuStatus:
    """Return the GPU that an operator named by its index on ``host``, its UUID, or the beginning of its UUID."""
    gpus = find(engine)
    if named.isdigit():
        matches = [gpu for gpu in gpus if gpu.host == host and gpu.index == int(named)]
    else:
        matches = [gpu for gpu in gpus if gpu.uuid.lower().startswith(named.lower())]
    if len(matches) != 1:
        listed = ", ".join(f"{gpu.index} on {gpu.host} ({gpu.uuid})" for gpu in matches or gpus) or "none"
        number = "more than one GPU" if matches else f"no GPU of {host}" if named.isdigit() else "no GPU"
        raise InvalidRequest(f"{number} is named by {named} (known GPUs: {listed})")
    return matches[0]


def drain(engine: Engine, uuid: str, *, reason: str | None) -> None:
    """Give a GPU no more evaluations until it is resumed. Running evaluations finish."""
    with transaction(engine) as connection:
        _move(connection, uuid, GpuState.DRAINED, reason, check_at=None)


def resume(engine: Engine, uuid: str) -> None:
    """Return a drained GPU to service. If its last self-test failed, it is first tested again."""
    with transaction(engine) as connection:
        if connection.scalar(select(Gpu.failures == 0).where(Gpu.uuid == uuid)):
            _move(connection, uuid, GpuState.SERVING, None, check_at=None)
        else:
            reason = connection.scalar(select(Gpu.reason).where(Gpu.uuid == uuid))
            _move(connection, uuid, GpuState.QUARANTINED, reason, check_at=func.now())


def quarantine(connection: Connection, uuid: str, *, reason: str) -> None:
    """Within the caller's transaction, take a GPU out of service until an operator resumes it, without self-tests.

    A drained GPU stays drained.
    """
    state = connection.scalar(select(Gpu.state).where(Gpu.uuid == uuid).with_for_update())
    if state is not None and state != GpuState.DRAINED:
        _move(connection, uuid, GpuState.QUARANTINED, reason, check_at=None)


def suspect(connection: Connection, uuid: str, *, reason: str, failed: bool) -> None:
    """Within the caller's transaction, request a self-test of a GPU from its supervisor. Other devices are ignored.

    ``failed`` is True if a self-test failed, and False for any other sign of a fault.
    """
    _change(
        connection,
        uuid,
        Gpu.state == GpuState.SERVING,
        check_at=func.now(),
        reason=clean.text(reason)[:_REASON_CHARACTERS],
        failures=func.greatest(Gpu.failures, int(failed)),
    )


def ask_for_test(engine: Engine, uuid: str, *, reason: str, failed: bool = False) -> None:
    """Request a self-test of a GPU in a separate transaction (:func:`suspect`)."""
    with transaction(engine) as connection:
        suspect(connection, uuid, reason=reason, failed=failed)


def reset(engine: Engine, uuid: str, *, reason: str, grace_s: float) -> bool:
    """Take a GPU out of service, restart its workers, and return it to service when it passes a self-test.

    A drained GPU is tested too, and stays drained whatever the result. Evaluations that run after ``grace_s`` seconds
    are aborted and retried elsewhere. Return False, with nothing changed, for a GPU that :func:`quarantine` took out of
    service: it can pass every self-test, and only :func:`resume` returns it to service.
    """
    with transaction(engine) as connection:
        connection.execute(select(Gpu.uuid).where(Gpu.uuid == uuid).with_for_update())
        gpus = _find(connection, uuids=[uuid], host=None)
        if any(gpu.is_left_alone for gpu in gpus):
            return False
        if all(gpu.state != GpuState.DRAINED for gpu in gpus):
            _move(connection, uuid, GpuState.QUARANTINED, reason, check_at=None)
        _change(connection, uuid, reset_at=func.now() + timedelta(seconds=grace_s), check_at=None)
        return True


def test_after_reset(engine: Engine, uuid: str) -> None:
    """Record that a GPU's workers ended for a reset, so that a self-test is due."""
    with transaction(engine) as connection:
        _change(connection, uuid, Gpu.reset_at.is_not(None), reset_at=None, check_at=func.now())


def record_pass(engine: Engine, uuid: str) -> None:
    """Record a passed self-test. The GPU serves again unless an operator drained it."""
    with transaction(engine) as connection:
        row = connection.execute(
            select(Gpu.state, Gpu.reset_at, Gpu.check_at).where(Gpu.uuid == uuid).with_for_update()
        ).first()
        _count(connection, uuid, failures=0)
        if row is not None and _left_to_tests(row):
            _move(connection, uuid, GpuState.SERVING, None, check_at=None)


def record_failure(engine: Engine, uuid: str, *, reason: str) -> GpuStatus | None:
    """Record a failed self-test. The second consecutive one takes the GPU out of service.

    Further self-tests follow at growing intervals.

    Returns:
        The GPU's new status, or None if it has no row.
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
        [gpu] = _find(connection, uuids=[uuid], host=None)
        return gpu


def _count(connection: Connection, uuid: str, *, failures: int) -> None:
    """Count a self-test. A drained GPU was tested for a reset and is not tested again."""
    check_at = case((Gpu.state == GpuState.DRAINED, null()), else_=Gpu.check_at)
    _change(connection, uuid, failures=failures, check_at=check_at)


def _left_to_tests(row: Row[*tuple[Any, ...]]) -> bool:
    """Return True if a self-test decides on a GPU's state: not while drained or resetting, or after quarantine()."""
    needs_operator = row.state == GpuState.QUARANTINED and row.check_at is None
    return row.state != GpuState.DRAINED and row.reset_at is None and not needs_operator


def postpone(engine: Engine, uuid: str, *, reason: str, seconds: float) -> None:
    """Record that a self-test was impossible. It is due again later, and nothing else changes."""
    with transaction(engine) as connection:
        _change(
            connection,
            uuid,
            Gpu.check_at.is_not(None),
            reason=case((Gpu.state == GpuState.DRAINED, Gpu.reason), else_=clean.text(reason)[:_REASON_CHARACTERS]),
            check_at=func.now() + timedelta(seconds=seconds),
        )


def _change(connection: Connection, uuid: str, *conditions: ColumnElement[bool], **values: Any) -> None:
    """Write columns of a GPU's row, if it meets the conditions."""
    connection.execute(update(Gpu).where(Gpu.uuid == uuid, *conditions).values(**values))


def _move(connection: Connection, uuid: str, state: GpuState, reason: str | None, *, check_at: Any) -> None:
    reason = None if reason is None else clean.text(reason)[:_REASON_CHARACTERS]
    since = case((Gpu.state == state, Gpu.since), else_=func.now())
    _change(connection, uuid, state=state, reason=reason, check_at=check_at, reset_at=None, since=since)
    if state == GpuState.SERVING:
        # The GPU is back in service, so pauses that probes caused end too.
        paused = update(ProbePause).where(ProbePause.device == uuid, ProbePause.resumed_at.is_(None))
        connection.execute(paused.values(resumed_at=func.now()))
    else:
        # The workers are paused at once, so that no retry is reserved for them and all reports show the pause. Claims
        # check the GPU's own row. The supervisor ends the pause.
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
    reset_due = and_(Gpu.reset_at.is_not(None), (Gpu.reset_at <= func.now()) | (func.cardinality(running) == 0))
    query = select(*columns(GpuStatus, Gpu, due=due, reset_due=reset_due, running=running))
    if uuids is not None:
        query = query.where(Gpu.uuid == any_text(uuids))
    if host is not None:
        query = query.where(Gpu.host == host)
    return read(GpuStatus, connection.execute(query.order_by(Gpu.host, Gpu.index)))
