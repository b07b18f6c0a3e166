"""Numbers of evaluations and attempts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    DateTime,
    Engine,
    Text,
    false,
    func,
    literal,
    null,
    or_,
    select,
    union_all,
)
from sqlalchemy.dialects.postgresql import ARRAY, aggregate_order_by

from kqueue.categories import Blame, Category
from kqueue.states import EvaluationState, Priority
from kqueue.store.engine import transaction
from kqueue.store.evaluations import OPEN, QUEUED, REAL
from kqueue.store.models import Attempt, Evaluation, Summary, Verdict, Worker
from kqueue.store.sql import any_text, any_uuid, read


def states(engine: Engine) -> dict[str, dict[EvaluationState, int]]:
    """Return the number of evaluations in each state, by lane."""
    counted: dict[str, dict[EvaluationState, int]] = {}
    with transaction(engine) as connection:
        for lane, state, number in connection.execute(
            select(Evaluation.lane, Evaluation.state, func.count())
            .where(REAL)
            .group_by(Evaluation.lane, Evaluation.state)
            .order_by(Evaluation.lane)
        ):
            counted.setdefault(lane, dict.fromkeys(EvaluationState, 0))[EvaluationState(state)] = number
    return counted


def backlog(engine: Engine) -> dict[str, dict[EvaluationState, int]]:
    """Return the number of evaluations that are queued and running, by lane. Finished ones are not counted."""
    counted: dict[str, dict[EvaluationState, int]] = {}
    open_states = (EvaluationState.QUEUED, EvaluationState.RUNNING)
    with transaction(engine) as connection:
        for lane, state, number in connection.execute(
            select(Evaluation.lane, Evaluation.state, func.count())
            .where(OPEN, REAL)
            .group_by(Evaluation.lane, Evaluation.state)
        ):
            counted.setdefault(lane, dict.fromkeys(open_states, 0))[EvaluationState(state)] = number
    return counted


@dataclass(frozen=True, slots=True)
class Crowd:
    """The queued evaluations of one lane, priority and producer.

    Attributes:
        lane, priority, producer: what they have in common.
        queued: their number.
        since: when the first of them was submitted, UTC.
    """

    lane: str
    priority: Priority
    producer: str
    queued: int
    since: datetime


def crowds(engine: Engine) -> list[Crowd]:
    """Return who has how many evaluations queued, by lane, priority and number."""
    group = (Evaluation.lane, Evaluation.priority, Evaluation.producer)
    number = func.count()
    query = select(*group, number.label("queued"), func.min(Evaluation.submitted_at).label("since"))
    query = query.where(QUEUED, REAL).group_by(*group)
    with transaction(engine) as connection:
        rows = connection.execute(query.order_by(Evaluation.lane, Evaluation.priority.desc(), number.desc()))
        return read(Crowd, rows)


def outcomes(
    engine: Engine, *, since: datetime | None = None, problem_hash: str | None = None, batch: str | None = None
) -> dict[Category, int]:
    """Return how many evaluations came to each category, in the categories' order; those without any left out.

    Args:
        engine: the database.
        since: finished then or later.
        problem_hash: only of this problem, by its whole hash.
        batch: only of this batch.
    """
    query = select(Summary.category, func.count().label("number")).group_by(Summary.category)
    if since is not None:
        recent = select(Verdict.evaluation_id).where(Verdict.finished_at >= since)
        query = query.where(Summary.evaluation_id.in_(recent))
    if problem_hash is not None:
        query = query.where(Summary.problem_hash == problem_hash)
    if batch is not None:
        query = query.where(Summary.batch == batch)
    with transaction(engine) as connection:
        counted = {row.category: row.number for row in connection.execute(query)}
    return {category: counted[category.value] for category in Category if category.value in counted}


def attempts_by_device(engine: Engine, *, since: datetime) -> dict[str, dict[Category, int]]:
    """Return what the attempts that began since came to, by device (a GPU's UUID, or ``cpu``) and category."""
    counted: dict[str, dict[Category, int]] = {}
    with transaction(engine) as connection:
        for device, category, number in connection.execute(
            select(Worker.device, Attempt.category, func.count())
            .join(Attempt, Attempt.worker_id == Worker.id)
            .join(Evaluation, Evaluation.id == Attempt.evaluation_id)
            .where(Worker.heartbeat_at >= since, Attempt.started_at >= since, Attempt.category.is_not(None), REAL)
            .group_by(Worker.device, Attempt.category)
            .order_by(Worker.device, Attempt.category)
        ):
            counted.setdefault(device, {})[Category(category)] = number
    return counted


@dataclass(frozen=True, slots=True)
class Fault:
    """Attempts that failed by the fleet's own fault, in one way.

    Attributes:
        category: how.
        number: how many there were.
        last_at: when the last of them began, UTC.
        message: what was said of that one.
    """

    category: Category
    number: int
    last_at: datetime
    message: str


def faults(engine: Engine, *, since: datetime) -> list[Fault]:
    """Return how the fleet failed in attempts that began since a moment, the most frequent first.

    Attempts that were broken off because their worker was told to stop are no failures.
    """
    newest = func.array_agg(aggregate_order_by(func.coalesce(Attempt.message, ""), Attempt.started_at.desc()))
    query = (
        select(
            Attempt.category,
            func.count().label("number"),
            func.max(Attempt.started_at).label("last_at"),
            newest[1].label("message"),
        )
        .where(
            Attempt.started_at >= since,
            Attempt.category.in_([category for category in Category if category.blame is Blame.FLEET]),
            Attempt.handed_back.is_(False),
        )
        .group_by(Attempt.category)
        .order_by(func.count().desc(), Attempt.category)
    )
    with transaction(engine) as connection:
        return read(Fault, connection.execute(query))


def among(batches: Collection[str], ids: Collection[UUID]) -> ColumnElement[bool]:
    """The condition that an evaluation belongs to one of these batches, or is one of these."""
    # No empty list is asked for: with one, no index would do.
    wanted: list[ColumnElement[bool]] = []
    if batches:
        wanted.append(Evaluation.batch == any_text(batches))
    if ids:
        wanted.append(Evaluation.id == any_uuid(ids))
    return or_(false(), *wanted)


@dataclass(frozen=True, slots=True)
class BatchState:
    """The progress of a batch.

    Attributes:
        total: its evaluations.
        queued, running, done: those in each state.
        categories: how many came to each.
        blames: the same by blame.
        submitted_at: when its first was accepted, UTC.
        finished_at: when its last one finished, UTC; None while one has not.
    """

    total: int
    queued: int
    running: int
    done: int
    categories: dict[Category, int]
    blames: dict[Blame, int]
    submitted_at: datetime
    finished_at: datetime | None


def batch_state(engine: Engine, batch: str) -> BatchState | None:
    """Return how far a batch is; None where no evaluation belongs to one of that name."""
    return state_of(engine, batches=[batch])


def state_of(engine: Engine, *, batches: Collection[str] = (), ids: Collection[UUID] = ()) -> BatchState | None:
    """Return how far batches and single evaluations are, taken together; None where there is none of them."""
    with transaction(engine) as connection:
        # One statement: what ends meanwhile is counted once.
        rows = connection.execute(_states(batches, ids)).all()
        # Of each batch one step through an index, however many evaluations it has.
        given = func.unnest(literal(list(batches), ARRAY(Text))).table_valued("batch").render_derived()
        first = select(func.min(Evaluation.submitted_at)).where(Evaluation.batch == given.c.batch).scalar_subquery()
        moments: list[datetime | None] = list(connection.scalars(select(first).select_from(given)))
    begun = [moment for moment in moments if moment is not None]
    begun += [row.first for row in rows if row.first is not None]
    if not rows or not begun:
        return None
    states = dict.fromkeys(EvaluationState, 0)
    counted: dict[str, int] = {}
    blames: dict[Blame, int] = {}
    for row in rows:
        states[EvaluationState(row.state)] += row.number
        if row.category is not None:
            counted[row.category] = counted.get(row.category, 0) + row.number
            blame = Category(row.category).blame
            blames[blame] = blames.get(blame, 0) + row.number
    total = sum(states.values())
    return BatchState(
        total=total,
        queued=states[EvaluationState.QUEUED],
        running=states[EvaluationState.RUNNING],
        done=states[EvaluationState.DONE],
        categories={category: counted[category.value] for category in Category if category.value in counted},
        blames=blames,
        submitted_at=min(begun),
        finished_at=max(row.last for row in rows) if states[EvaluationState.DONE] == total else None,
    )


def _states(batches: Collection[str], ids: Collection[UUID]) -> CompoundSelect[*tuple[Any, ...]]:
    """Select states with categories, numbers, and the first submission and last end of what is named by its id."""
    number, never = func.count().label("number"), null().cast(DateTime(timezone=True))
    waiting = (
        select(Evaluation.state, null().cast(Text).label("category"), number, never.label("first"), never.label("last"))
        .where(OPEN, Evaluation.batch == any_text(batches))
        .group_by(Evaluation.state)
    )
    ended = (
        select(literal(EvaluationState.DONE.value), Summary.category, number, never, func.max(Summary.finished_at))
        .where(Summary.batch == any_text(batches))
        .group_by(Summary.category)
    )
    others = (
        select(
            Evaluation.state,
            Verdict.category,
            number,
            func.min(Evaluation.submitted_at),
            func.max(Verdict.finished_at),
        )
        .outerjoin(Verdict, Verdict.evaluation_id == Evaluation.id)
        .where(Evaluation.id == any_uuid(ids), (Evaluation.batch == any_text(batches)).is_not(True))
        .group_by(Evaluation.state, Verdict.category)
    )
    return union_all(waiting, ended, others)
