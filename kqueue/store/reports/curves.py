"""The data of charts: the candidates of a problem over time, KernelBench's fast_p, and counts by category.

Each query reads the evaluations of one problem or batch through an index.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

from sqlalchemy import ColumnElement, Double, Engine, and_, case, func, literal_column, null, select, union_all
from sqlalchemy.dialects.postgresql import aggregate_order_by
from sqlalchemy.sql.selectable import Subquery

from kqueue.categories import Blame, Category
from kqueue.store.engine import transaction
from kqueue.store.evaluations import OPEN, no_trial
from kqueue.store.models import Evaluation, Summary, Verdict
from kqueue.store.reports.row import EXPRESSIONS

#: Categories of correct kernels.
RIGHT: Final = [category for category in Category if category.blame is Blame.NONE]
#: Conditions on valid measurements, with the same literal as in the partial indexes, which Postgres would not use with
#: a parameter.
MEASURED: Final[tuple[ColumnElement[bool], ...]] = (
    Summary.category == literal_column(f"'{Category.PASSED}'"),
    ~Summary.reused,
    Summary.runtime_ms.is_not(None),
)
_BLAMES: Final[dict[str, Blame]] = {category.value: category.blame for category in Category}


@dataclass(frozen=True, slots=True)
class Point:
    """A candidate of a problem.

    Attributes:
        at: the time of its verdict, UTC.
        speedup: the median of its kernel's speedups over the baseline. None if it was not timed.
        blame: the verdict's blame, ``none`` if it passed.
    """

    evaluation_id: UUID
    at: datetime
    speedup: float | None
    blame: Blame


@dataclass(frozen=True, slots=True)
class FastP:
    """The data of KernelBench's fast_p of a batch.

    Attributes:
        speedups: the best lower bound of a speedup of each problem with a correct kernel, ascending. 0 if not timed.
        problems: the number of all problems of the batch.
    """

    speedups: list[float]
    problems: int


def medians_of(problem_hash: str) -> Subquery:
    """Return the query for the median speedup of each measured kernel of a problem, with its first measurement."""
    speedup: ColumnElement[float] = func.percentile_disc(0.5).within_group(Summary.speedup)
    first: ColumnElement[UUID] = func.array_agg(
        aggregate_order_by(Summary.evaluation_id, Summary.finished_at, Summary.evaluation_id)
    )[1]
    return (
        select(
            Summary.kernel_hash,
            speedup.label("speedup"),
            func.min(Summary.finished_at).label("at"),
            first.label("evaluation_id"),
        )
        .where(Summary.problem_hash == problem_hash, Summary.speedup.is_not(None), no_trial(Summary.batch), *MEASURED)
        .group_by(Summary.kernel_hash)
        .subquery()
    )


def best_so_far(engine: Engine, problem_hash: str, *, limit: int = 20_000) -> list[Point]:
    """Return the latest candidates of a problem in the order of their verdicts."""
    medians = medians_of(problem_hash)
    timed = and_(medians.c.kernel_hash == Summary.kernel_hash, Summary.speedup.is_not(None))
    latest = (
        select(Summary.evaluation_id, Summary.finished_at.label("at"), medians.c.speedup, Summary.category)
        .outerjoin(medians, timed)
        .where(Summary.problem_hash == problem_hash, no_trial(Summary.batch))
        .order_by(Summary.finished_at.desc(), Summary.evaluation_id.desc())
        .limit(limit)
    )
    with transaction(engine) as connection:
        rows = connection.execute(latest).all()
    # There can be tens of thousands of rows, so each look-up matters.
    return [Point(identity, at, speedup, _BLAMES[category]) for identity, at, speedup, category in reversed(rows)]


def fast_p(engine: Engine, batch: str) -> FastP:
    """Return the highest speedups of correct kernels of a batch by problem, and the number of its problems.

    A speedup counts by the lower end of its interval where that is known, so that no kernel is faster than itself.
    """
    low = func.coalesce(EXPRESSIONS["speedup_low"], Summary.speedup, 0.0)
    right = case((Summary.category.in_(RIGHT), low))
    ended = select(Summary.problem_hash, right.label("best")).where(Summary.batch == batch)
    ended = ended.join(Verdict, Verdict.evaluation_id == Summary.evaluation_id)
    waiting = select(Evaluation.problem_hash, null().cast(Double)).where(OPEN, Evaluation.batch == batch).distinct()
    every = union_all(ended, waiting).subquery()
    with transaction(engine) as connection:
        best = list(connection.scalars(select(func.max(every.c.best)).group_by(every.c.problem_hash)))
    return FastP(sorted(one for one in best if one is not None), len(best))
