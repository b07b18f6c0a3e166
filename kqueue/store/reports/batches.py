"""Batches: lists of them, their best kernels and their failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

from sqlalchemy import Engine, Text, func, literal, select, true
from sqlalchemy.dialects.postgresql import ARRAY, aggregate_order_by

from kqueue.categories import Blame, Category
from kqueue.store.engine import transaction
from kqueue.store.evaluations import OPEN, no_trial
from kqueue.store.models import Batch, Evaluation, Summary, Verdict
from kqueue.store.reports.curves import RIGHT
from kqueue.store.reports.row import Row, select_of, view
from kqueue.store.sql import fetch, read

#: Number of additionally read batches, because a batch's last submission can be a second later than in its row.
_NEAR: Final = 100


@dataclass(frozen=True, slots=True)
class KnownBatch:
    """A batch.

    Attributes:
        unfinished: the number of evaluations without a verdict.
        submitted_at, last_at: the first and the last submission, UTC.
    """

    name: str
    evaluations: int
    unfinished: int
    submitted_at: datetime
    last_at: datetime


@dataclass(frozen=True, slots=True)
class BatchFault:
    """One kind of failure in a batch.

    Attributes:
        category, blame: the kind of failure and its blame.
        evaluation_id, message: an example and its message.
    """

    category: Category
    blame: Blame
    number: int
    evaluation_id: UUID
    message: str


@view("problem_hash problem_label batch judged right speedup speedup_low speedup_high")
class Cell(Row):
    """The kernels of a batch for a problem: how many have a verdict and are right, and the largest speedup."""

    batch: str
    judged: int
    right: int


def known_batches(engine: Engine, *, beginning: str = "", limit: int = 50) -> list[KnownBatch]:
    """Return batches, the latest submission first. ``beginning`` is the prefix of their names."""
    # The rows' times are exact to a second, so some more batches are read.
    latest = (
        select(Batch.name)
        .where(Batch.name.startswith(beginning, autoescape=True) if beginning else no_trial(Batch.name))
        .order_by(Batch.last_at.desc(), Batch.name)
        .limit(limit + _NEAR)
        .subquery()
    )
    mine = Evaluation.batch == latest.c.name
    first, last = (select(edge(Evaluation.submitted_at)).where(mine).scalar_subquery() for edge in (func.min, func.max))
    begun = select(latest.c.name, first.label("submitted_at"), last.label("last_at")).subquery()
    page = (
        select(begun)
        .where(begun.c.last_at.is_not(None))  # retention can have removed all evaluations
        .order_by(begun.c.last_at.desc(), begun.c.name)
        .limit(limit)
        .subquery()
    )
    unfinished = select(func.count()).where(OPEN, Evaluation.batch == page.c.name).scalar_subquery()
    ended = select(func.count()).where(Summary.batch == page.c.name).scalar_subquery()
    query = select(page, unfinished.label("unfinished"), (ended + unfinished).label("evaluations"))
    return fetch(engine, KnownBatch, query.order_by(page.c.last_at.desc(), page.c.name))


def names(engine: Engine, beginning: str, *, limit: int = 200) -> list[str]:
    """Return the name of a batch, or if no batch has it the names that begin with it, the latest first."""
    fits = Batch.name.startswith(beginning, autoescape=True)
    query = select(Batch.name).where(fits).order_by(Batch.name != beginning, Batch.last_at.desc(), Batch.name)
    with transaction(engine) as connection:
        found = list(connection.scalars(query.limit(limit)))
    return found[:1] if found[:1] == [beginning] else found


def matrix(engine: Engine, names: Sequence[str]) -> list[Cell]:
    """Return the cells of a table of problems by batches, by the problems' labels."""
    is_right = Summary.category.in_(RIGHT)
    fastest_first = aggregate_order_by(Summary.evaluation_id, Summary.speedup.desc().nulls_last())
    cells = (
        select(
            Summary.problem_hash,
            Summary.batch,
            func.count().label("judged"),
            func.count().filter(is_right).label("right"),
            func.array_agg(fastest_first).filter(is_right)[1].label("fastest"),
        )
        .where(Summary.batch.in_(names))
        .group_by(Summary.problem_hash, Summary.batch)
        .subquery()
    )
    mine = (Evaluation.problem_hash == cells.c.problem_hash, Evaluation.batch == cells.c.batch)
    label = select(Evaluation.problem_label).where(*mine).limit(1).scalar_subquery()
    query = select(*select_of(Cell, cells, Verdict, problem_label=label)).select_from(cells)
    query = query.outerjoin(Verdict, Verdict.evaluation_id == cells.c.fastest)
    return fetch(engine, Cell, query.order_by("problem_label", cells.c.problem_hash))


def batch_faults(engine: Engine, batch: str, counts: Mapping[Category, int]) -> list[BatchFault]:
    """Return the kinds of failures in a batch, each with an example, the most frequent first.

    ``counts`` are the numbers of its verdicts by category.
    """
    failed = [category for category in counts if category not in RIGHT]
    given = func.unnest(literal(failed, ARRAY(Text))).table_valued("category").render_derived()
    # Each category takes one step through an index.
    one = (
        select(Summary.evaluation_id)
        .where(Summary.batch == batch, Summary.category == given.c.category)
        .limit(1)
        .lateral()
    )
    query = (
        select(Verdict.category, Verdict.blame, Verdict.evaluation_id, Verdict.message)
        .select_from(given)
        .join(one, true())
        .join(Verdict, Verdict.evaluation_id == one.c.evaluation_id)
    )
    with transaction(engine) as connection:
        rows = connection.execute(query).all()
    faults = [fault for row in rows for fault in read(BatchFault, [row], number=counts[Category(row.category)])]
    return sorted(faults, key=lambda fault: (-fault.number, fault.category))


def ended_since(engine: Engine, batch: str, *, since: datetime) -> int:
    """Return the number of verdicts of a batch since a time."""
    query = select(func.count()).where(Summary.batch == batch, Summary.finished_at >= since)
    with transaction(engine) as connection:
        return connection.scalars(query).one()
