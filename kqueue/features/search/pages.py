"""The pages of searches and tuning runs: steps, the tree of proposals, and two runs side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final
from uuid import UUID

from fastapi import Query, Request, Response
from markupsafe import Markup
from sqlalchemy import Engine

from kqueue import charts
from kqueue.categories import Category
from kqueue.charts import Theme
from kqueue.errors import InvalidRequest
from kqueue.features.search import reports
from kqueue.features.search.reports import ListedRun, ProposalLine
from kqueue.http.failures import HttpError
from kqueue.store import searches
from kqueue.store.searches import Proposal, Run, Step
from kqueue.web import present
from kqueue.web.export import Format, FormatQuery, as_file, one_page
from kqueue.web.parameters import CurrentGateway, RunName, TextFilter, given_filters
from kqueue.web.pictures import can_draw, picture
from kqueue.web.route import Viewer, page, pages

router: Final = pages()

_PAGE: Final = 50
_MOST_RUNS: Final = 10_000
#: Maximum indentation of the tree. Deeper proposals have the same indentation.
_DEEPEST: Final = 12
_METRIC: Final = "inverse_runtime"
#: Categories that this version knows. A fleet of another version can have judged a proposal with other categories.
_CATEGORIES: Final = frozenset(Category)


@dataclass(frozen=True, slots=True)
class Branch:
    """A proposal in the tree. ``depth`` is the number of its ancestors."""

    line: ProposalLine
    depth: int
    score: float | None
    is_best: bool


@dataclass(frozen=True, slots=True)
class Shown:
    """A run with the data of its page. In the tree each proposal comes after its parent.

    ``is_cut`` is True if the run has more proposals.
    """

    run: Run
    metric: str
    steps: Sequence[Step]
    tree: Sequence[Branch]
    best: Branch | None
    passed: int
    is_cut: bool

    @property
    def curve(self) -> charts.Curve:
        """The scores of its proposals and tests, for a chart."""
        ordered = sorted(self.tree, key=lambda branch: branch.line.number)
        points = [(branch.line.number, branch.score) for branch in ordered if branch.score is not None]
        tests = [
            (test["number"], test["scores"][self.metric])
            for step in self.steps
            if (test := step.test) and self.metric in (test.get("scores") or {})
        ]
        return charts.Curve(self.run.name, points, tests)


@router.get("/runs")
async def listing(
    request: Request, _: Viewer, gateway: CurrentGateway, name: TextFilter = None, form: FormatQuery = Format.HTML
) -> Response:
    """Show searches and tuning runs, the latest first."""
    rows = await gateway.read(reports.listed_runs, named=name, limit=_PAGE if form is Format.HTML else _MOST_RUNS)
    if form is not Format.HTML:
        return await as_file(form, "runs", ListedRun, one_page(rows))
    return page(request, "search/runs.html", rows=rows, asked=given_filters(name=name), most=_PAGE)


@router.get("/runs/{which}/curve.svg")
async def curve_picture(_: Viewer, gateway: CurrentGateway, which: RunName, theme: Theme = Theme.LIGHT) -> Response:
    """Draw the scores of a run."""
    shown = await gateway.read(_shown, which)
    return await picture(charts.SearchCurve(shown.run.name, shown.metric, [shown.curve]), theme)


@router.get("/runs/{first}/{second}/curve.svg")
async def curves_picture(
    _: Viewer, gateway: CurrentGateway, first: RunName, second: RunName, theme: Theme = Theme.LIGHT
) -> Response:
    """Draw the scores of two runs."""
    one, other = await gateway.read(_both, first, second)
    title = f"{one.run.name} and {other.run.name}"
    return await picture(charts.SearchCurve(title, one.metric, [one.curve, other.curve]), theme)


@router.get("/runs/{which}")
async def run(
    request: Request,
    _: Viewer,
    gateway: CurrentGateway,
    which: RunName,
    proposal: Annotated[int | None, Query(ge=0, le=2**31 - 1)] = None,
    form: FormatQuery = Format.HTML,
) -> Response:
    """Show a run with one of its proposals in full, by default the best."""
    shown = await gateway.read(_shown, which)
    if form is not Format.HTML:
        lines = [branch.line for branch in shown.tree]
        return await as_file(form, f"run-{shown.run.id}", ProposalLine, one_page(lines))
    number = proposal if proposal is not None or shown.best is None else shown.best.line.number
    full, kernel = (None, None) if number is None else await gateway.read(_in_full, shown.run.id, number)
    others = await gateway.read(reports.listed_runs, limit=_PAGE)
    return page(
        request,
        "search/run.html",
        shown=shown,
        plan=_plan(shown.run),
        full=full,
        kernel=kernel,
        asked=number,
        known_categories=_CATEGORIES,
        others=[other for other in others if other.id != shown.run.id],
        can_draw=can_draw(),
    )


@router.get("/runs/{first}/{second}")
async def side_by_side(
    request: Request, _: Viewer, gateway: CurrentGateway, first: RunName, second: RunName
) -> Response:
    """Show two runs side by side."""
    both = await gateway.read(_both, first, second)
    return page(
        request,
        "search/runs_compared.html",
        both=both,
        plans=[_plan(shown.run) for shown in both],
        known_categories=_CATEGORIES,
        can_draw=can_draw(),
    )


def _both(engine: Engine, first: str, second: str) -> tuple[Shown, Shown]:
    return _shown(engine, first), _shown(engine, second)


def _shown(engine: Engine, which: str) -> Shown:
    try:
        run = searches.find(engine, which)
    except InvalidRequest as error:
        raise HttpError(404, str(error)) from None
    lines = reports.proposal_lines(engine, run.id)
    steps = searches.steps(engine, run.id)
    metrics: Any = run.plan.get("metrics")
    metric = str(metrics[0]) if isinstance(metrics, list) and metrics else _METRIC
    scores = {line.number: (line.scores or {}).get(metric) for line in lines}
    best = _best(steps, scores)
    tree = [
        Branch(line, min(depth, _DEEPEST), scores[line.number], line.number == best) for line, depth in _tree(lines)
    ]
    return Shown(
        run=run,
        metric=metric,
        steps=steps,
        tree=tree,
        best=next((branch for branch in tree if branch.is_best), None),
        passed=sum(line.category == "passed" for line in lines),
        is_cut=len(lines) == reports.PROPOSALS,
    )


def _in_full(engine: Engine, run_id: UUID, number: int) -> tuple[Proposal | None, Markup | None]:
    """Return a proposal and its highlighted kernel, each None if missing."""
    full = reports.proposal(engine, run_id, number)
    return full, present.source(full.kernel) if full is not None and full.kernel else None


def _best(steps: Sequence[Step], scores: dict[int, float | None]) -> int | None:
    """Return the best proposal of the last step that names one, or the proposal with the highest score."""
    named = [step.best for step in steps if step.best is not None]
    if named:
        return named[-1]
    scored = {number: score for number, score in scores.items() if score is not None}
    return max(scored, key=lambda number: scored[number]) if scored else None


def _tree(lines: Sequence[ProposalLine]) -> list[tuple[ProposalLine, int]]:
    """Return proposals with their depths in depth-first order."""
    numbers = {line.number for line in lines}
    children: dict[int | None, list[ProposalLine]] = {}
    for line in lines:
        # A parent has a smaller number. Ignoring any other record keeps the tree free of cycles.
        parent = line.parent if line.parent in numbers and line.parent < line.number else None
        children.setdefault(parent, []).append(line)
    tree: list[tuple[ProposalLine, int]] = []
    waiting = [(line, 0) for line in reversed(children.get(None, []))]
    while waiting:
        line, depth = waiting.pop()
        tree.append((line, depth))
        waiting += [(child, depth + 1) for child in reversed(children.get(line.number, []))]
    return tree


def _plan(run: Run) -> list[tuple[str, str]]:
    """Return the settings of a run without sources."""
    return [
        (name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for name, value in run.plan.items()
        if name not in {"problem", "kernel", "settings", "candidates"} and value is not None
    ]
