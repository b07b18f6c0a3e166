"""Numbers of evaluations and attempts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, TypeVar
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
from kqueue.store import callbacks
from kqueue.store.callbacks import CallbackState
from kqueue.store.engine import transaction
from kqueue.store.evaluations import OPEN, QUEUED, REAL, no_trial
from kqueue.store.models import Attempt, Evaluation, Summary, Verdict, Worker
from kqueue.store.sql import any_text, any_uuid, fetch

_T = TypeVar("_T")


def states(engine: Engine) -> dict[str, dict[EvaluationState, int]]:
    """Return the number of evaluations in each state, by lane."""
    return _by_lane(engine, tuple(EvaluationState), REAL)


def backlog(engine: Engine) -> dict[str, dict[EvaluationState, int]]:
    """Return the number of queued and running evaluations, by lane."""
    return _by_lane(engine, (EvaluationState.QUEUED, EvaluationState.RUNNING), REAL, OPEN)


def _by_lane(
    engine: Engine, shown: Collection[EvaluationState], *wanted: ColumnElement[bool]
) -> dict[str, dict[EvaluationState, int]]:
    counted: dict[str, dict[EvaluationState, int]] = {}
    group = (Evaluation.lane, Evaluation.state)
    query = select(*group, func.count()).where(*wanted).group_by(*group).order_by(Evaluation.lane)
    with transaction(engine) as connection:
        for lane, state, number in connection.execute(query):
            counted.setdefault(lane, dict.fromkeys(shown, 0))[EvaluationState(state)] = number
    return counted


@dataclass(frozen=True, slots=True)
class Crowd:
    """The queued evaluations of one lane, priority and producer.

    Attributes:
        lane, priority, producer: their common lane, priority and producer.
        since: the earliest time of submission, UTC.
    """

    lane: str
    priority: Priority
    producer: str
    queued: int
    since: datetime


def crowds(engine: Engine) -> list[Crowd]:
    """Return the numbers of queued evaluations by lane, priority and producer, ordered by lane, priority and number."""
    group = (Evaluation.lane, Evaluation.priority, Evaluation.producer)
    number = func.count()
    query = select(*group, number.label("queued"), func.min(Evaluation.submitted_at).label("since"))
    query = query.where(QUEUED, REAL).group_by(*group)
    return fetch(engine, Crowd, query.order_by(Evaluation.lane, Evaluation.priority.desc(), number.desc()))


def outcomes(
    engine: Engine, *, since: datetime | None = None, problem_hash: str | None = None, batch: str | None = None
) -> dict[Category, int]:
    """Return the number of evaluations of each category that occurs, in the categories' order."""
    query = select(Summary.category, func.count().label("number")).group_by(Summary.category)
    if since is not None:
        recent = select(Verdict.evaluation_id).where(Verdict.finished_at >= since)
        query = query.where(Summary.evaluation_id.in_(recent))
    if problem_hash is not None:
        query = query.where(Summary.problem_hash == problem_hash)
    query = query.where(no_trial(Summary.batch) if batch is None else Summary.batch == batch)
    with transaction(engine) as connection:
        counted = {row.category: row.number for row in connection.execute(query)}
    return {category: counted[category.value] for category in Category if category.value in counted}


def attempts_by_device(engine: Engine, *, since: datetime) -> dict[str, dict[Category, int]]:
    """Return the numbers of attempts that began since a time, by device (a GPU's UUID, or ``cpu``) and category."""
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
    """Attempts with one kind of failure of the fleet.

    Attributes:
        category: the kind.
        last_at: the start of the last one, UTC.
        message: the message of the last one.
    """

    category: Category
    number: int
    last_at: datetime
    message: str


def faults(engine: Engine, *, since: datetime) -> list[Fault]:
    """Return the failures of the fleet in attempts that began since a time, the most frequent first.

    Attempts that were aborted because their worker was asked to stop are no failures.
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
    return fetch(engine, Fault, query)


def among(batches: Collection[str], ids: Collection[UUID]) -> ColumnElement[bool]:
    """Return the condition that an evaluation belongs to one of these batches or has one of these ids."""
    # Empty lists are omitted, because Postgres would use no index with one.
    wanted: list[ColumnElement[bool]] = []
    if batches:
        wanted.append(Evaluation.batch == any_text(batches))
    if ids:
        wanted.append(Evaluation.id == any_uuid(ids))
    return or_(false(), *wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchState:
    """The progress of a batch.

    Attributes:
        total: the number of its evaluations.
        queued, running, done: the number of evaluations in each state.
        categories: the number of verdicts of each category.
        blames: the number of verdicts by blame.
        submitted_at: the first submission, UTC.
        finished_at: the last verdict, UTC. None while any evaluation has none.
    """

    total: int
    queued: int
    running: int
    done: int
    categories: dict[Category, int]
    blames: dict[Blame, int]
    submitted_at: datetime
    finished_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(BatchState):
    """The progress of the batch with the name ``batch``, and the state of its callback, if it has one."""

    batch: str
    callbacks: tuple[CallbackState, ...] = ()


def batch_state(engine: Engine, batch: str) -> Batch | None:
    """Return the progress of a batch."""
    called = callbacks.states(engine, batch=batch)
    return _state(engine, partial(Batch, batch=batch, callbacks=called), [batch], ())


def state_of(engine: Engine, *, batches: Collection[str] = (), ids: Collection[UUID] = ()) -> BatchState | None:
    """Return the common progress of batches and single evaluations, or None if there are none."""
    return _state(engine, BatchState, batches, ids)


def _state(engine: Engine, make: Callable[..., _T], batches: Collection[str], ids: Collection[UUID]) -> _T | None:
    with transaction(engine) as connection:
        # In one statement, evaluations that end meanwhile are counted once.
        rows = connection.execute(_states(batches, ids)).all()
        # Each batch takes one step through an index, however many evaluations it has.
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
    return make(
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
    """Return the query for states, categories and numbers, and for first submission and last end of single ids."""
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
    single = (
        select(
            Evaluation.state, Verdict.category, number, func.min(Evaluation.submitted_at), func.max(Verdict.finished_at)
        )
        .outerjoin(Verdict, Verdict.evaluation_id == Evaluation.id)
        .where(Evaluation.id == any_uuid(ids), (Evaluation.batch == any_text(batches)).is_not(True))
        .group_by(Evaluation.state, Verdict.category)
    )
    return union_all(waiting, ended, single)
