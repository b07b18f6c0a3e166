"""The reason why an evaluation waits, and the expected duration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection, Double, Engine, Row, any_, cast, func, select, text, tuple_

from kqueue.errors import UnknownEvaluation
from kqueue.figures import moment
from kqueue.limits import hard_limit_s
from kqueue.states import EvaluationState, Priority
from kqueue.store.engine import FLEET, acting, transaction
from kqueue.store.evaluations.conditions import QUEUED
from kqueue.store.evaluations.order import BATCH_SHARE, Shares, Used, read_shares, room
from kqueue.store.evaluations.publishing import MESSAGES, to_message
from kqueue.store.models import Attempt, Evaluation, Worker
from kqueue.store.sql import any_uuid

#: Maximum number of counted evaluations. Each priority and producer gets an equal part of it.
_COUNTED: Final = 100_000
#: Seconds, and multiple of the mean duration of its producer's attempts, above which an attempt runs longer than
#: expected.
_LONG_S: Final = 5.0
_LONG: Final = 3.0
#: Maximum number of such attempts that a reason names.
_NAMED: Final = 2


class Why(StrEnum):
    """The reason why an evaluation waits."""

    NO_WORKER = "no_worker"
    """No live worker serves its lane."""
    PAUSED = "paused"
    """All workers of its lane are paused."""
    RETRY = "retry"
    """The fleet failed, and the next try is not due yet."""
    LIMIT = "limit"
    """Its token runs as many attempts at once as its upper limit allows."""
    TURN = "turn"
    """Other evaluations come first."""
    NEXT = "next"
    """The next free worker takes it."""
    HELD = "held"
    """Attempts that run much longer than expected hold all slots of its lane."""
    DEVICE = "device"
    """It runs, and its worker waits for a device that a process outside the fleet holds."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """The wait of an evaluation. The numbers assume that nothing else is submitted.

    Attributes:
        why: the reason.
        message: the reason for people, in one line.
        ahead: the number of evaluations that come before it. None while no worker of the lane takes any.
        starts_in_s: seconds until it begins. None if the duration of evaluations is unknown.
        error_s: the standard deviation in seconds of ``starts_in_s``. None if ``more`` is True.
        more: True if too many wait to count all, so that ``ahead`` and ``starts_in_s`` are lower bounds.
    """

    why: Why
    message: str
    ahead: int | None = None
    starts_in_s: float | None = None
    error_s: float | None = None
    more: bool = False


@dataclass(slots=True)
class _Work:
    """A set of evaluations: their number (with ``more`` a lower bound), expected seconds, and the variance of these."""

    number: float = 0.0
    seconds: float = 0.0
    variance: float = 0.0
    more: bool = False

    def add(self, number: float, used: Used) -> None:
        """Add evaluations of a producer. The error of its mean duration is common to all of them."""
        spread = max(0.0, used.squares / used.ended - used.mean_s**2) if used.ended > 0 else used.mean_s**2
        self.number += number
        self.seconds += number * used.mean_s
        self.variance += number * spread + number**2 * spread / max(1.0, used.ended)

    def plus(self, other: _Work, share: float) -> _Work:
        """Return the sum of this work and a share of another."""
        return _Work(
            self.number + share * other.number,
            self.seconds + share * other.seconds,
            self.variance + share**2 * other.variance,
            self.more or (other.more and share == 1),
        )


def waiting(engine: Engine, evaluation_id: UUID, *, within_s: float, counted: int = _COUNTED) -> Waiting | None:
    """Return the wait of an evaluation, or None if it does not wait.

    A worker counts as alive for ``within_s`` seconds without a heartbeat. At most ``counted`` evaluations are counted.
    """
    with transaction(engine) as connection:
        mine = connection.execute(
            select(
                Evaluation.state,
                Evaluation.lane,
                Evaluation.priority,
                Evaluation.producer,
                Evaluation.submitted_at,
                Evaluation.id,
                func.extract("epoch", Evaluation.available_at - func.now()).label("due_in_s"),
            ).where(Evaluation.id == evaluation_id)
        ).one_or_none()
        if mine is None:
            raise UnknownEvaluation(evaluation_id)
        if mine.state != EvaluationState.QUEUED:
            return _kept_waiting(connection, evaluation_id)
    # The evaluations of all owners come before it, and the result has only their number.
    with acting(FLEET), transaction(engine) as connection:
        alive = Worker.stopped_at.is_(None) & (Worker.heartbeat_at >= func.now() - timedelta(seconds=within_s))
        pauses = connection.scalars(select(Worker.paused).where(alive, mine.lane == any_(Worker.lanes))).all()
        slots = sum(reason is None for reason in pauses)
        if not pauses:
            return Waiting(Why.NO_WORKER, f"no live worker serves the lane {mine.lane}")
        if not slots:
            return Waiting(Why.PAUSED, f"all {len(pauses)} workers of the lane {mine.lane} pause: {pauses[0]}")
        if mine.due_in_s > 0:
            return Waiting(Why.RETRY, f"the fleet failed, and the next try is due in {mine.due_in_s:.1f} s")
        if room(connection).get(mine.producer) == 0:
            return Waiting(Why.LIMIT, "its token runs as many evaluations at once as its upper limit `running` allows")
        own, waiting, most = _crowd(connection, mine, counted)
        shares = read_shares(connection)[mine.lane.partition(".")[0]]
        running = connection.execute(
            select(Evaluation.id, Evaluation.priority, Evaluation.producer, Attempt.started_at, _AGE.label("seconds"))
            .join(Attempt, Attempt.evaluation_id == Evaluation.id)
            .join(Worker, Worker.id == Attempt.worker_id)
            .where(Attempt.ended_at.is_(None), alive, Worker.paused.is_(None), mine.lane == any_(Worker.lanes))
            .order_by(Attempt.started_at)
        ).all()
        late = [row for row in running if row.seconds > max(_LONG_S, _LONG * _used(shares, row).mean_s)]
        ends = {
            row.id: hard_limit_s(to_message(row).deadlines_s)
            for row in connection.execute(MESSAGES.where(Evaluation.id == any_uuid([one.id for one in late])))
        }
    with transaction(engine) as connection:
        visible = set(connection.scalars(select(Evaluation.id).where(Evaluation.id == any_uuid([*ends]))))
    held = [
        f"{row.id if row.id in visible else 'one that you cannot read'} since {moment(row.started_at)}, until "
        f"{moment(row.started_at + timedelta(seconds=ends[row.id]))} at the latest"
        for row in late
        if row.id in ends
    ]
    shown = "; ".join(held[:_NAMED]) + (f"; and {len(held) - _NAMED} more" if len(held) > _NAMED else "")
    if len(held) >= slots:
        return Waiting(Why.HELD, f"all slots of the lane {mine.lane} are held, longer than expected: by {shown}")
    before = _before(shares, Priority(mine.priority), mine.producer, own, waiting, most)
    left = _left(shares, [row for row in running if row not in late])
    free = slots - len(held)
    known = any(used.ended > 0 for used in shares.used.values())
    found = _waiting(mine.lane, before, left, len(running) - len(held), free, known=known)
    return replace(found, message=f"{found.message}. Other slots are held: by {shown}") if held else found


def _kept_waiting(connection: Connection, evaluation_id: UUID) -> Waiting | None:
    """Return the wait of a running evaluation's worker for its device, or None if it does not wait."""
    waited_s = func.extract("epoch", func.now() - func.greatest(Worker.waits_since, Attempt.started_at))
    row = connection.execute(
        select(Worker.name, Worker.waits_for, waited_s.label("seconds"))
        .join(Attempt, Attempt.worker_id == Worker.id)
        .where(Attempt.evaluation_id == evaluation_id, Attempt.ended_at.is_(None), Worker.waits_for.is_not(None))
    ).one_or_none()
    if row is None:
        return None
    return Waiting(
        Why.DEVICE,
        f"{row.name} runs it, and has waited for its device for {row.seconds:.0f} s: {row.waits_for} holds it",
    )


_AGE = cast(func.extract("epoch", func.now() - Attempt.started_at), Double)


#: Query for the number of each priority's and producer's evaluations on a lane, at most its part of ``counted``, and
#: that part. It finds each group with one step through an index.
_CROWD: Final = text("""
    WITH RECURSIVE groups AS (
        (
            SELECT priority, producer FROM evaluations WHERE state = 'queued' AND lane = :lane
            ORDER BY priority, producer LIMIT 1
        )
        UNION ALL
        SELECT later.* FROM groups CROSS JOIN LATERAL (
            SELECT e.priority, e.producer FROM evaluations AS e
            WHERE e.state = 'queued' AND e.lane = :lane
              AND (e.priority, e.producer) > (groups.priority, groups.producer)
            ORDER BY e.priority, e.producer LIMIT 1
        ) AS later
    ), share AS (SELECT greatest(10, :counted / greatest(1, count(*))) AS most FROM groups)
    SELECT groups.priority, groups.producer, share.most, counted.number
    FROM groups CROSS JOIN share CROSS JOIN LATERAL (
        SELECT count(*) AS number FROM (
            SELECT FROM evaluations AS e
            WHERE e.state = 'queued' AND e.lane = :lane AND e.priority = groups.priority
              AND e.producer = groups.producer
            LIMIT share.most
        ) AS few
    ) AS counted
""")


def _crowd(
    connection: Connection, mine: Row[*tuple[Any, ...]], counted: int
) -> tuple[int, dict[tuple[Priority, str], int], int]:
    """Return how many evaluations of this producer and priority are earlier, the counts by group, and their maximum."""
    rows = connection.execute(_CROWD, {"lane": mine.lane, "counted": counted}).all()
    most = min((row.most for row in rows), default=counted)
    first = (
        select(Evaluation.id)
        .where(
            QUEUED,
            Evaluation.lane == mine.lane,
            Evaluation.priority == mine.priority,
            Evaluation.producer == mine.producer,
            tuple_(Evaluation.submitted_at, Evaluation.id) < tuple_(mine.submitted_at, mine.id),
        )
        .limit(most)
        .subquery()
    )
    own = connection.scalars(select(func.count()).select_from(first)).one()
    return own, {(Priority(row.priority), row.producer): row.number for row in rows}, most


def _before(
    shares: Shares, priority: Priority, producer: str, own: int, waiting: Mapping[tuple[Priority, str], int], most: int
) -> _Work:
    """Return the work before an evaluation, which includes ``own`` earlier ones of its producer and priority."""
    # Numbers that are equal to `most` are lower bounds.
    mine = shares.of(priority, producer)
    same, other = _Work(), _Work()
    for (of, name), number in waiting.items():
        if of is not priority and of is not Priority.IDLE:
            other.add(number, shares.of(of, name))
            other.more = other.more or number >= most

    def burden(name: str) -> float:
        """Return a producer's use when its interactive evaluations have ended."""
        higher = 0.0
        if priority is Priority.BATCH:
            number = waiting.get((Priority.INTERACTIVE, name), 0)
            higher = number * shares.of(Priority.INTERACTIVE, name).mean_s
        return shares.burden(name) + higher / shares.weights.get(name, 1.0)

    until = burden(producer) + own * mine.mean_s / shares.weights.get(producer, 1.0)
    same.add(own, mine)
    same.more = own >= most
    for (of, name), number in waiting.items():
        if of is priority and name != producer:
            used = shares.of(of, name)
            # The other producer goes first until it has used as much as this one will have.
            seconds = (until - burden(name)) * shares.weights.get(name, 1.0)
            turns = max(0, math.ceil(seconds / max(used.mean_s, 1e-3)))
            same.add(min(number, turns), used)
            same.more = same.more or turns > number >= most
    if priority is Priority.IDLE:
        return same.plus(other, 1.0)
    used_s = {p: sum(used.seconds for (of, _), used in shares.used.items() if of is p) for p in Priority}
    interactive, batch = used_s[Priority.INTERACTIVE], used_s[Priority.BATCH]
    if priority is Priority.BATCH:
        # The wait lasts until batch has its share of all seconds, these included.
        ahead_s = (batch + same.seconds) * (1 / BATCH_SHARE - 1) - interactive
    else:
        ahead_s = (interactive + same.seconds) / (1 / BATCH_SHARE - 1) - batch
    share = min(1.0, max(0.0, ahead_s / other.seconds)) if other.seconds > 0 else 0.0
    return same.plus(other, share)


def _left(shares: Shares, running: Iterable[Row[*tuple[Any, ...]]]) -> _Work:
    """Return the remaining work of running attempts."""
    left = _Work()
    for row in running:
        used = _used(shares, row)
        left.add(max(0.1, 1 - row.seconds / used.mean_s) if used.mean_s > 0 else 0.0, used)
    return left


def _used(shares: Shares, row: Row[*tuple[Any, ...]]) -> Used:
    """Return the recent use of a running attempt's producer and priority."""
    return shares.of(Priority(row.priority), row.producer)


def _waiting(lane: str, before: _Work, left: _Work, running: int, slots: int, *, known: bool) -> Waiting:
    ahead, more = round(before.number), before.more
    starts_in_s = error_s = None
    when = ""
    if known:
        busy = running >= slots
        starts_in_s = (before.seconds + (left.seconds if busy or ahead else 0.0)) / slots
        if more:
            when = f": it begins in {starts_in_s:.0f} s at the earliest"
        else:
            error_s = math.sqrt(before.variance + (left.variance if busy or ahead else 0.0)) / slots
            when = f": it begins in about {starts_in_s:.0f} s, give or take {error_s:.0f} s"
    of = f"the lane {lane}, which has {slots} slot{'' if slots == 1 else 's'}"
    if ahead:
        number = f"at least {ahead}" if more else str(ahead)
        message = f"{number} come{'s' if ahead == 1 else ''} before it on {of}{when}"
        return Waiting(Why.TURN, message, ahead, starts_in_s, error_s, more)
    return Waiting(Why.NEXT, f"it is the next on {of}{when}", ahead, starts_in_s, error_s)
