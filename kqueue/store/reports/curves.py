"""What charts show: the candidates of a problem over time, KernelBench's fast_p, and counts by category.

Each asks an index for the evaluations of one problem or batch, never for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy import Engine, case, func, select

from kqueue.categories import Blame
from kqueue.store.engine import transaction
from kqueue.store.evaluations import REAL
from kqueue.store.models import Evaluation, Verdict
from kqueue.store.sql import read


@dataclass(frozen=True, slots=True)
class Point:
    """A candidate of a problem.

    Attributes:
        evaluation_id: its evaluation.
        at: when its verdict was reached, UTC.
        speedup: how many times as fast as the baseline it is; None if it was not timed.
        blame: of its verdict: ``none`` if it passed.
    """

    evaluation_id: UUID
    at: datetime
    speedup: float | None
    blame: Blame


@dataclass(frozen=True, slots=True)
class FastP:
    """What KernelBench's fast_p of a batch is made from.

    Attributes:
        speedups: that of the best right kernel of each problem that has one, the slowest first; 0 where none was timed.
        problems: how many problems the batch has, with those that have no right kernel.
    """

    speedups: list[float]
    problems: int


def best_so_far(engine: Engine, problem_hash: str, *, limit: int = 20_000) -> list[Point]:
    """Return the candidates of a problem in the order of their verdicts.

    Args:
        engine: the database.
        problem_hash: the problem's whole hash.
        limit: only the latest ones, at most so many.
    """
    latest = (
        select(Verdict.evaluation_id, Verdict.finished_at.label("at"), Verdict.speedup, Verdict.blame)
        .join(Evaluation, Evaluation.id == Verdict.evaluation_id)
        .where(Evaluation.problem_hash == problem_hash, REAL)
        .order_by(Verdict.finished_at.desc(), Verdict.evaluation_id.desc())
        .limit(limit)
    )
    with transaction(engine) as connection:
        return read(Point, connection.execute(latest))[::-1]


def fast_p(engine: Engine, batch: str) -> FastP:
    """Return the speedups of the best right kernels of a batch, by problem, and the number of its problems."""
    right = case((Verdict.blame == Blame.NONE.value, func.coalesce(Verdict.speedup, 0.0)))
    query = (
        select(func.max(right).label("best"))
        .select_from(Evaluation)
        .outerjoin(Verdict, Verdict.evaluation_id == Evaluation.id)
        .where(Evaluation.batch == batch, REAL)
        .group_by(Evaluation.problem_hash)
    )
    with transaction(engine) as connection:
        best = list(connection.scalars(query))
    return FastP(sorted(one for one in best if one is not None), len(best))
