"""Why an evaluation waits, and for how long."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Engine, Row, any_, func, select, tuple_

from kqueue.errors import UnknownEvaluation
from kqueue.states import EvaluationState, Priority
from kqueue.store.engine import transaction
from kqueue.store.evaluations.conditions import QUEUED
from kqueue.store.evaluations.order import BATCH_SHARE, Shares, Used, read_shares
from kqueue.store.models import Attempt, Evaluation, Worker


class Why(StrEnum):
    """The reason why an evaluation waits."""

    NO_WORKER = "no_worker"
    """No live worker serves its lane."""
    PAUSED = "paused"
    """All workers of its lane pause."""
    RETRY = "retry"
    """The fleet failed, and the next try is not due yet."""
    TURN = "turn"
    """It is others' turn."""
    NEXT = "next"
    """Its turn has come: the next worker that is free takes it."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why an evaluation waits. The numbers hold if nothing else is submitted.

    Attributes:
        why: the reason.
        message: the same for people, in one line.
        ahead: the number of evaluations whose turn comes before; None where nothing is taken at present.
        starts_in_s: seconds until it begins; None where nothing is known of how long evaluations take.
        error_s: the standard deviation of that, in seconds.
    """

    why: Why
    message: str
    ahead: int | None = None
    starts_in_s: float | None = None
    error_s: float | None = None


@dataclass(slots=True)
class _Work:
    """Some evaluations: their number, the seconds that they take, and the variance of these."""

    number: float = 0.0
    seconds: float = 0.0
    variance: float = 0.0

    def add(self, number: float, used: Used) -> None:
        """Add as many evaluations of a producer. What its mean is wrong by counts for all of them."""
        spread = max(0.0, used.squares / used.ended - used.mean_s**2) if used.ended > 0 else used.mean_s**2
        self.number += number
        self.seconds += number * used.mean_s
        self.variance += number * spread + number**2 * spread / max(1.0, used.ended)

    def plus(self, other: _Work, share: float) -> _Work:
        """Return this work and a share of another."""
        return _Work(
            self.number + share * other.number,
            self.seconds + share * other.seconds,
            self.variance + share**2 * other.variance,
        )


def waiting(engine: Engine, evaluation_id: UUID, *, within_s: float) -> Waiting | None:
    """Return why an evaluation waits; None if it does not.

    Args:
        engine: the database.
        evaluation_id: the evaluation.
        within_s: seconds without a heartbeat for which a worker counts as alive.

    Raises:
        UnknownEvaluation: there is no such evaluation.
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
            return None
        pauses = connection.scalars(
            select(Worker.paused).where(
                Worker.stopped_at.is_(None),
                Worker.heartbeat_at >= func.now() - timedelta(seconds=within_s),
                mine.lane == any_(Worker.lanes),
            )
        ).all()
        slots = sum(reason is None for reason in pauses)
        if not pauses:
            return Waiting(Why.NO_WORKER, f"no live worker serves the lane {mine.lane}")
        if not slots:
            return Waiting(Why.PAUSED, f"all {len(pauses)} workers of the lane {mine.lane} pause: {pauses[0]}")
        if mine.due_in_s > 0:
            return Waiting(Why.RETRY, f"the fleet failed; it is tried again in {mine.due_in_s:.1f} s")
        own, waiting = _crowd(connection, mine)
        shares = read_shares(connection)[mine.lane.partition(".")[0]]
        running = connection.execute(
            select(Evaluation.priority, Evaluation.producer, _AGE.label("seconds"))
            .join(Attempt, Attempt.evaluation_id == Evaluation.id)
            .where(Attempt.ended_at.is_(None), Evaluation.lane == mine.lane)
        ).all()
    before = _before(shares, Priority(mine.priority), mine.producer, own, waiting)
    return _told(mine.lane, before, _left(shares, running), len(running), slots, known=_is_known(shares))


_AGE = func.extract("epoch", func.now() - Attempt.started_at)


def _crowd(connection: Connection, mine: Row[*tuple[Any, ...]]) -> tuple[int, dict[tuple[Priority, str], int]]:
    """Return how many of the same producer and priority come first, and how many of each wait on the lane."""
    on_lane = (QUEUED, Evaluation.lane == mine.lane)
    own = connection.scalars(
        select(func.count()).where(
            *on_lane,
            Evaluation.priority == mine.priority,
            Evaluation.producer == mine.producer,
            tuple_(Evaluation.submitted_at, Evaluation.id) < tuple_(mine.submitted_at, mine.id),
        )
    ).one()
    rows = connection.execute(
        select(Evaluation.priority, Evaluation.producer, func.count().label("number"))
        .where(*on_lane)
        .group_by(Evaluation.priority, Evaluation.producer)
    )
    return own, {(Priority(row.priority), row.producer): row.number for row in rows}


def _before(
    shares: Shares, priority: Priority, producer: str, own: int, waiting: Mapping[tuple[Priority, str], int]
) -> _Work:
    """Return the work whose turn comes before that of an evaluation.

    Args:
        shares: what all have used.
        priority: the evaluation's.
        producer: whose it is.
        own: the number of evaluations of the same producer and priority that come first.
        waiting: the number of evaluations that wait, by priority and producer.
    """
    mine = shares.of(priority, producer)
    same, other = _Work(), _Work()
    for (of, name), number in waiting.items():
        if of is not priority:
            other.add(number, shares.of(of, name))

    def burden(name: str) -> float:
        """Return a producer's burden at that time, when its interactive ones have ended."""
        higher = 0.0
        if priority is Priority.BATCH:
            number = waiting.get((Priority.INTERACTIVE, name), 0)
            higher = number * shares.of(Priority.INTERACTIVE, name).mean_s
        return shares.burden(name) + higher / shares.weights.get(name, 1.0)

    until = burden(producer) + own * mine.mean_s / shares.weights.get(producer, 1.0)
    same.add(own, mine)
    for (of, name), number in waiting.items():
        if of is priority and name != producer:
            used = shares.of(of, name)
            # It goes first until it has used as much as this producer will have.
            seconds = (until - burden(name)) * shares.weights.get(name, 1.0)
            same.add(min(number, max(0, math.ceil(seconds / max(used.mean_s, 1e-3)))), used)
    used_s = {p: sum(used.seconds for (of, _), used in shares.used.items() if of is p) for p in Priority}
    interactive, batch = used_s[Priority.INTERACTIVE], used_s[Priority.BATCH]
    if priority is Priority.BATCH:
        # Until batch has its share of everything, this included.
        ahead_s = (batch + same.seconds) * (1 / BATCH_SHARE - 1) - interactive
    else:
        ahead_s = (interactive + same.seconds) / (1 / BATCH_SHARE - 1) - batch
    share = min(1.0, max(0.0, ahead_s / other.seconds)) if other.seconds > 0 else 0.0
    return same.plus(other, share)


def _left(shares: Shares, running: Iterable[Row[*tuple[Any, ...]]]) -> _Work:
    """Return what is left of the attempts that run."""
    left = _Work()
    for row in running:
        used = shares.of(Priority(row.priority), row.producer)
        left.add(max(0.1, 1 - row.seconds / used.mean_s) if used.mean_s > 0 else 0.0, used)
    return left


def _is_known(shares: Shares) -> bool:
    """Return True if anything has ended of late."""
    return any(used.ended > 0 for used in shares.used.values())


def _told(lane: str, before: _Work, left: _Work, running: int, slots: int, *, known: bool) -> Waiting:
    ahead = round(before.number)
    starts_in_s = error_s = None
    when = ""
    if known:
        busy = running >= slots
        starts_in_s = (before.seconds + (left.seconds if busy or ahead else 0.0)) / slots
        error_s = math.sqrt(before.variance + (left.variance if busy or ahead else 0.0)) / slots
        when = f"; it begins in about {starts_in_s:.0f} s, give or take {error_s:.0f} s"
    of = f"the lane {lane}, which has {slots} slot{'' if slots == 1 else 's'}"
    if ahead:
        return Waiting(
            Why.TURN, f"{ahead} come{'s' if ahead == 1 else ''} before it on {of}{when}", ahead, starts_in_s, error_s
        )
    return Waiting(Why.NEXT, f"it is the next on {of}{when}", ahead, starts_in_s, error_s)
