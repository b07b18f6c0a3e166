"""Batches: lists of them, their best kernels, and how they failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

from sqlalchemy import Engine, Text, func, literal, select, true
from sqlalchemy.dialects.postgresql import ARRAY

from kqueue.categories import Blame, Category
from kqueue.contract import Backend
from kqueue.store.engine import transaction
from kqueue.store.evaluations import OPEN
from kqueue.store.models import Batch, Evaluation, Kernel, Summary, Verdict
from kqueue.store.reports.curves import RIGHT
from kqueue.store.sql import read

#: Batches that are looked at beyond those that are asked for, as each may be a second later than its row says.
_NEAR: Final = 100


@dataclass(frozen=True, slots=True)
class KnownBatch:
    """A batch.

    Attributes:
        name: as its producer gave it.
        evaluations: the number of its evaluations.
        unfinished: those that have no verdict yet.
        submitted_at, last_at: when its first and its last one were submitted, UTC.
    """

    name: str
    evaluations: int
    unfinished: int
    submitted_at: datetime
    last_at: datetime


@dataclass(frozen=True, slots=True)
class BestOfBatch:
    """A kernel of a batch that passed and was timed; times in milliseconds."""

    evaluation_id: UUID
    problem_hash: str
    problem_label: str | None
    kernel_hash: str
    kernel_label: str | None
    backend: Backend
    runtime_ms: float
    baseline_ms: float | None
    speedup: float | None
    finished_at: datetime


@dataclass(frozen=True, slots=True)
class BatchFault:
    """How some evaluations of a batch failed.

    Attributes:
        category, blame: how, and by whose fault.
        number: how many did.
        evaluation_id, message: one of them, and what was said of it.
    """

    category: Category
    blame: Blame
    number: int
    evaluation_id: UUID
    message: str


def known_batches(engine: Engine, *, beginning: str = "", limit: int = 50) -> list[KnownBatch]:
    """Return batches, those with the latest submission first.

    Args:
        engine: the database.
        beginning: what their names begin with.
        limit: at most so many.
    """
    # Their rows tell the time within a second, so some more are looked at.
    some = (
        select(Batch.name)
        .where(Batch.name.startswith(beginning, autoescape=True))
        .order_by(Batch.last_at.desc(), Batch.name)
        .limit(limit + _NEAR)
        .subquery()
    )
    mine = Evaluation.batch == some.c.name
    first, last = (select(edge(Evaluation.submitted_at)).where(mine).scalar_subquery() for edge in (func.min, func.max))
    begun = select(some.c.name, first.label("submitted_at"), last.label("last_at")).subquery()
    found = (
        select(begun)
        .where(begun.c.last_at.is_not(None))  # retention may have removed all of one
        .order_by(begun.c.last_at.desc(), begun.c.name)
        .limit(limit)
        .subquery()
    )
    unfinished = select(func.count()).where(OPEN, Evaluation.batch == found.c.name).scalar_subquery()
    ended = select(func.count()).where(Summary.batch == found.c.name).scalar_subquery()
    query = select(found, unfinished.label("unfinished"), ended.label("ended")).order_by(
        found.c.last_at.desc(), found.c.name
    )
    with transaction(engine) as connection:
        rows = connection.execute(query).all()
    return [
        KnownBatch(row.name, row.ended + row.unfinished, row.unfinished, row.submitted_at, row.last_at) for row in rows
    ]


def best_of_batch(engine: Engine, batch: str, *, limit: int = 20) -> list[BestOfBatch]:
    """Return a batch's kernels that passed and were timed, the largest speedup first; no reused verdicts."""
    best = (
        select(Summary.evaluation_id, Summary.speedup, Summary.runtime_ms)
        .where(
            Summary.batch == batch,
            Summary.category == Category.PASSED,
            Summary.runtime_ms.is_not(None),
            Summary.reused.is_(False),
        )
        .order_by(Summary.speedup.desc().nulls_last(), Summary.runtime_ms, Summary.evaluation_id)
        .limit(limit)
        .subquery()
    )
    query = (
        select(
            Evaluation.id.label("evaluation_id"),
            Evaluation.problem_hash,
            Evaluation.problem_label,
            Evaluation.kernel_hash,
            Evaluation.kernel_label,
            Kernel.backend,
            Verdict.runtime_ms,
            Verdict.baseline_ms,
            Verdict.speedup,
            Verdict.finished_at,
        )
        .select_from(best)
        .join(Evaluation, Evaluation.id == best.c.evaluation_id)
        .join(Verdict, Verdict.evaluation_id == Evaluation.id)
        .join(Kernel, Kernel.hash == Evaluation.kernel_hash)
        .order_by(best.c.speedup.desc().nulls_last(), best.c.runtime_ms, best.c.evaluation_id)
    )
    with transaction(engine) as connection:
        return read(BestOfBatch, connection.execute(query))


def batch_faults(engine: Engine, batch: str, counts: Mapping[Category, int]) -> list[BatchFault]:
    """Return how evaluations of a batch failed, with an example of each way, the most frequent first.

    Args:
        engine: the database.
        batch: its name.
        counts: how many of its evaluations came to each category, as :class:`BatchState` has it.
    """
    failed = [category for category in counts if category not in RIGHT]
    given = func.unnest(literal(failed, ARRAY(Text))).table_valued("category").render_derived()
    # One step through an index for each.
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
    found = [fault for row in rows for fault in read(BatchFault, [row], number=counts[Category(row.category)])]
    return sorted(found, key=lambda fault: (-fault.number, fault.category))


def ended_since(engine: Engine, batch: str, *, since: datetime) -> int:
    """Return how many evaluations of a batch got their verdicts since a moment."""
    query = select(func.count()).where(Summary.batch == batch, Summary.finished_at >= since)
    with transaction(engine) as connection:
        return connection.scalars(query).one()
