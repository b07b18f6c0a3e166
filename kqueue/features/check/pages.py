"""The pages of checks: verdicts and times of an operator's revisions, which the labels of its evaluations name.

A line of a chart is one environment, so that a change of the environment is not taken for one of the code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from fastapi import Request, Response
from sqlalchemy import Engine, func, select
from sqlalchemy.dialects.postgresql import aggregate_order_by

from kqueue import charts
from kqueue.categories import Blame, Category
from kqueue.charts import Theme
from kqueue.features.check.reports import place
from kqueue.features.duel.duels import ERROR
from kqueue.http.failures import HttpError
from kqueue.store.engine import transaction
from kqueue.store.models import Attempt, Batch, Environment, Evaluation, Verdict
from kqueue.store.sql import fetch
from kqueue.web.export import Format, FormatQuery, as_file, one_page
from kqueue.web.parameters import BatchName, CurrentGateway, TextFilter, given_filters
from kqueue.web.pictures import can_draw, picture
from kqueue.web.route import Viewer, page, pages

router: Final = pages()

#: Maximum number of operators that are listed, and of an operator's revisions that are shown, the latest ones.
_MOST: Final = 100
#: Maximum number of lines of a chart, the latest ones: each size that was drawn from a range has its own.
_MOST_LINES: Final = 10
#: The end of the label of a kernel that a check judged, and its sizes that were drawn from ranges.
_REVISION: Final = r" at ([0-9a-f]{12}) of (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)$"
_DRAWN: Final = r" with (.*)" + _REVISION.replace("(", "(?:")
_OF_CHECK: Final = (
    Evaluation.batch.in_(select(Batch.name).where(Batch.name.startswith("check-"))),
    Evaluation.kernel_label.regexp_match(_REVISION),
)


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator with sizes or ranges and dtype, and the number of its judged revisions."""

    label: str
    revisions: int
    last_at: datetime


@dataclass(frozen=True, slots=True)
class Judged:
    """The judgement of a revision in one environment, and at one size of a range.

    Attributes:
        sizes: the sizes that were drawn from ranges, or None.
        category, evaluation_id: of its last failure, or else of its last evaluation.
        processes, runtime_ms, low_ms, high_ms: the number of timed processes, and the median of their times, with its
            interval if there are enough.
    """

    revision: str
    committed_at: str
    category: Category
    runtime_ms: float | None
    low_ms: float | None
    high_ms: float | None
    processes: int
    device: str
    driver: str | None
    torch: str
    triton: str | None
    sizes: str | None
    first_at: datetime
    evaluation_id: UUID

    @property
    def place(self) -> str:
        """The environment in words, after the sizes if they were drawn."""
        where = place(self.device, self.driver, self.torch, self.triton)
        return f"{self.sizes}, {where}" if self.sizes else where


@router.get("/checks")
async def operators(request: Request, _: Viewer, gateway: CurrentGateway, name: TextFilter = None) -> Response:
    """Show the operators that checks judged, the latest first."""
    rows = await gateway.read(_operators, name or "")
    return page(request, "check/operators.html", rows=rows, asked=given_filters(name=name), most=_MOST)


@router.get("/checks/{label:path}/history.svg")
async def history_picture(_: Viewer, gateway: CurrentGateway, label: BatchName, theme: Theme = Theme.LIGHT) -> Response:
    """Draw the times of an operator's revisions."""
    return await picture(_chart(label, await gateway.read(_judged, label)), theme)


@router.get("/checks/{label:path}")
async def operator(
    request: Request, _: Viewer, gateway: CurrentGateway, label: BatchName, form: FormatQuery = Format.HTML
) -> Response:
    """Show the revisions of an operator, the latest first."""
    rows = await gateway.read(_judged, label)
    if form is not Format.HTML:
        return await as_file(form, "check", Judged, one_page(rows))
    return page(request, "check/operator.html", label=label, rows=rows[::-1], most=_MOST, can_draw=can_draw())


def _operators(engine: Engine, part: str) -> list[Operator]:
    revisions: Any = func.count(func.substring(Evaluation.kernel_label, _REVISION).distinct())
    label, last = Evaluation.problem_label.label("label"), func.max(Evaluation.submitted_at).label("last_at")
    query = select(label, revisions.label("revisions"), last).where(*_OF_CHECK, label.icontains(part, autoescape=True))
    return fetch(engine, Operator, query.group_by("label").order_by(last.desc(), "label").limit(_MOST))


def _judged(engine: Engine, label: str) -> list[Judged]:
    """Return the revisions of an operator by their commits, each in all its environments by their first use."""
    problems = select(Evaluation.problem_hash).where(*_OF_CHECK, Evaluation.problem_label == label)
    parts: Any = func.regexp_match(Evaluation.kernel_label, _REVISION)
    sizes: Any = func.substring(Evaluation.kernel_label, _DRAWN)
    keys = (parts, Environment.device, Environment.driver, Environment.torch, Environment.triton, sizes)
    failed_first = (Verdict.blame == Blame.NONE, Verdict.finished_at.desc(), Verdict.evaluation_id)
    values: Any = func.array_agg(Verdict.runtime_ms)
    worst = [func.array_agg(aggregate_order_by(one, *failed_first))[1] for one in (Verdict.category, Evaluation.id)]
    timed = values.filter(Verdict.runtime_ms.is_not(None), Verdict.reused_from.is_(None))
    query = (
        select(*keys, *worst, timed, func.min(Verdict.finished_at))
        .join(Verdict, Verdict.evaluation_id == Evaluation.id)
        .outerjoin(Attempt, Attempt.id == Verdict.attempt_id)
        .join(Environment, Environment.hash == func.coalesce(Verdict.environment_hash, Attempt.environment_hash))
        .where(Evaluation.problem_hash.in_(problems), Evaluation.problem_label == label)
        .where(Evaluation.kernel_label.regexp_match(_REVISION), Verdict.blame.in_((Blame.NONE, Blame.CANDIDATE)))
        .group_by(*keys)
    )
    rows: list[Judged] = []
    with transaction(engine) as connection:
        for (revision, committed), *environment, category, identity, listed, first in connection.execute(query):
            times = (*_median(sorted(listed or ())), len(listed or ()))
            fields: Any = (revision, committed, Category(category), *times, *environment, first, identity)
            rows.append(Judged(*fields))
    if not rows:
        raise HttpError(404, f"no check judged the operator {label}")
    rows.sort(key=lambda row: (row.committed_at, row.revision, row.first_at))
    latest = list(dict.fromkeys(row.revision for row in reversed(rows)))[:_MOST]
    return [row for row in rows if row.revision in latest]


def _median(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """Return the median of sorted values, and its interval of 98 % by their order, which needs seven values."""
    if not values:
        return None, None, None
    count, rank, outside = len(values), 0, 0
    while 2 * (outside := outside + math.comb(count, rank)) <= ERROR * 2**count:
        rank += 1
    low, high = (values[rank - 1], values[-rank]) if rank else (None, None)
    return (values[(count - 1) // 2] + values[count // 2]) / 2, low, high


def _chart(label: str, rows: Sequence[Judged]) -> charts.History:
    """Return the chart of an operator. An environment follows the one that judged first on the same device before."""
    numbers = {revision: number for number, revision in enumerate(dict.fromkeys(row.revision for row in rows))}
    lines, earlier = list[charts.Line](), dict[str, list[Judged]]()
    places = list(dict.fromkeys(row.place for row in sorted(rows, key=lambda row: row.first_at)))
    for where in places[-_MOST_LINES:]:
        of = [row for row in rows if row.place == where]
        began, change = float(numbers[of[0].revision]), ""
        if before := earlier.get(of[0].device):
            pairs = [(name, getattr(before[0], name), getattr(of[0], name)) for name in ("driver", "torch", "triton")]
            change = ", ".join(f"{name} {old} to {new}" for name, old, new in pairs if old != new)
            began -= 0 if any(row.revision == of[0].revision for row in before) else 0.5
        earlier[of[0].device] = of
        timed = ((numbers[row.revision], row.runtime_ms, row.low_ms, row.high_ms) for row in of)
        times = [(number, ms, ms - (low or ms), (high or ms) - ms) for number, ms, low, high in timed if ms is not None]
        failed = [numbers[row.revision] for row in of if row.category.blame is Blame.CANDIDATE]
        lines.append(charts.Line(where, times, failed, began, change))
    return charts.History(label, list(numbers), lines)
