"""Batches: lists of them, their best kernels, and how they failed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy import ColumnElement, Engine, func, select, text

from kqueue.categories import Blame, Category
from kqueue.contract import Backend
from kqueue.store.engine import transaction
from kqueue.store.evaluations import OPEN
from kqueue.store.models import Evaluation, Kernel, Verdict
from kqueue.store.sql import any_text, read

#: The most names of batches among which the latest are looked for.
NAMES: Final = 10_000


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


#: Names are found by one step through an index for each.
_LATEST: Final = text("""
    WITH RECURSIVE names AS (
        (
            SELECT batch, 1 AS nr FROM evaluations
            WHERE batch IS NOT NULL AND batch >= :least AND starts_with(batch, :beginning) ORDER BY batch LIMIT 1
        )
        UNION ALL
        SELECT later.batch, names.nr + 1 FROM names CROSS JOIN LATERAL (
            SELECT e.batch FROM evaluations AS e
            WHERE e.batch IS NOT NULL AND e.batch > names.batch ORDER BY e.batch LIMIT 1
        ) AS later
        WHERE names.nr < :most AND starts_with(later.batch, :beginning)
    )
    SELECT names.batch, last.last_at FROM names CROSS JOIN LATERAL (
        SELECT max(e.submitted_at) AS last_at FROM evaluations AS e WHERE e.batch = names.batch
    ) AS last
    ORDER BY last.last_at DESC, names.batch LIMIT :limit
""")


def known_batches(engine: Engine, *, beginning: str = "", limit: int = 50) -> list[KnownBatch]:
    """Return batches, those with the latest submission first.

    Args:
        engine: the database.
        beginning: what their names begin with. Of more than :data:`NAMES` names only so many are looked at, in the
            order of the alphabet.
        limit: at most so many.
    """
    whole = select(
        Evaluation.batch.label("name"),
        func.count().label("evaluations"),
        func.min(Evaluation.submitted_at).label("submitted_at"),
        func.max(Evaluation.submitted_at).label("last_at"),
    )
    unfinished = select(Evaluation.batch, func.count().label("number")).where(OPEN)
    values = {"least": beginning, "beginning": beginning, "most": NAMES, "limit": limit}
    with transaction(engine) as connection:
        names: list[str] = [row.batch for row in connection.execute(_LATEST, values)]
        these = Evaluation.batch == any_text(names)
        counted = connection.execute(unfinished.where(these).group_by(Evaluation.batch))
        left = {row.batch: row.number for row in counted}
        rows = connection.execute(whole.where(these).group_by(Evaluation.batch)).all()
    found = {
        row.name: KnownBatch(row.name, row.evaluations, left.get(row.name, 0), row.submitted_at, row.last_at)
        for row in rows
    }
    return [found[name] for name in names if name in found]


def best_of_batch(engine: Engine, batch: str, *, limit: int = 20) -> list[BestOfBatch]:
    """Return a batch's kernels that passed and were timed, the largest speedup first; no reused verdicts."""
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
        .join(Verdict, Verdict.evaluation_id == Evaluation.id)
        .join(Kernel, Kernel.hash == Evaluation.kernel_hash)
        .where(
            Evaluation.batch == batch,
            Verdict.category == Category.PASSED,
            Verdict.runtime_ms.is_not(None),
            Verdict.reused_from.is_(None),
        )
        .order_by(Verdict.speedup.desc().nulls_last(), Verdict.runtime_ms, Evaluation.id)
        .limit(limit)
    )
    with transaction(engine) as connection:
        return read(BestOfBatch, connection.execute(query))


def batch_faults(engine: Engine, batch: str) -> list[BatchFault]:
    """Return how evaluations of a batch failed, with an example of each way, the most frequent first."""
    some: ColumnElement[Any] = func.array_agg(Verdict.evaluation_id)
    counted = (
        select(func.count().label("number"), some[1].label("one"))
        .join(Evaluation, Evaluation.id == Verdict.evaluation_id)
        .where(Evaluation.batch == batch, Verdict.blame != Blame.NONE)
        .group_by(Verdict.category)
        .subquery()
    )
    query = (
        select(Verdict.category, Verdict.blame, counted.c.number, Verdict.evaluation_id, Verdict.message)
        .join(counted, counted.c.one == Verdict.evaluation_id)
        .order_by(counted.c.number.desc(), Verdict.category)
    )
    with transaction(engine) as connection:
        return read(BatchFault, connection.execute(query))


def ended_since(engine: Engine, batch: str, *, since: datetime) -> int:
    """Return how many evaluations of a batch got their verdicts since a moment."""
    query = (
        select(func.count())
        .select_from(Verdict)
        .join(Evaluation, Evaluation.id == Verdict.evaluation_id)
        .where(Verdict.finished_at >= since, Evaluation.batch == batch)
    )
    with transaction(engine) as connection:
        return connection.scalars(query).one()
