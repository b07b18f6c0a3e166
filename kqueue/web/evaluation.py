"""The page of one evaluation, with its actions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal
from uuid import UUID

from fastapi import Query, Request, Response
from fastapi.responses import RedirectResponse
from sqlalchemy import Engine

from kqueue import contract, differences, examinations, feedback, figures, registry, statement
from kqueue.charts import Theme
from kqueue.errors import InvalidRequest
from kqueue.evidence import BaselineError, Histogram, Measurement, WrongMap
from kqueue.http.failures import HttpError
from kqueue.http.gateway import Gateway
from kqueue.states import ArtifactName, EvaluationState
from kqueue.store import reports
from kqueue.store.reports import Detail
from kqueue.web import present
from kqueue.web.live import live
from kqueue.web.parameters import CurrentGateway
from kqueue.web.pictures import can_draw, picture
from kqueue.web.route import Actor, Viewer, page, pages, submitted

router: Final = pages()

#: Number of characters of a log on the page, counted from its end.
_LOG: Final = 20_000
#: Maximum lines of a difference on the page.
_CHANGES: Final = 2000
#: Number of the problem's other evaluations that are offered for a comparison.
_OTHERS: Final = 50


@dataclass(frozen=True, slots=True)
class Column:
    """A bin of a histogram on axes from 0 to 100. The fullest bin has the height 100."""

    left: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Plot:
    """The spread of a measurement on an axis from 0 to 100."""

    name: str
    taken: Measurement
    low: float
    q1: float
    median: float
    q3: float
    high: float
    columns: Sequence[Column]


@dataclass(frozen=True, slots=True)
class Span:
    """A part of an evaluation's life, on an axis from 0 to 100."""

    kind: str
    name: str
    start: float
    width: float
    seconds: float


@dataclass(frozen=True, slots=True)
class HeatMap:
    """The wrong parts of an output: the cells of a :class:`WrongMap` with their ranges of rows and columns."""

    rows: Sequence[tuple[str, str]]
    columns: Sequence[str]
    words: str


@router.get("/evaluations/{name}")
async def evaluation(
    request: Request,
    viewer: Viewer,
    gateway: CurrentGateway,
    name: str,
    against: Annotated[str | None, Query(max_length=100)] = None,
) -> Response:
    """Show an evaluation, given by its id or the id's first digits."""
    evaluation_id = await gateway.read(reports.resolve_id, name)
    if str(evaluation_id) != name:
        return RedirectResponse(f"/evaluations/{evaluation_id}", 303)
    fields = await gateway.read(_read, evaluation_id, against, within_s=gateway.config.live_s)
    parts = [await gateway.read(part, viewer, fields["detail"]) for part in registry.attached("evaluation")]
    return page(request, "evaluation.html", attached=parts, **fields)


@router.get("/live/evaluations/{evaluation_id}")
async def evaluation_live(request: Request, viewer: Viewer, gateway: CurrentGateway, evaluation_id: UUID) -> Response:
    """Send an evaluation's state after each change until it has its verdict."""
    within_s = gateway.config.live_s

    async def render() -> str | None:
        detail = await gateway.read(reports.show, evaluation_id, within_s=within_s)
        if detail.state is EvaluationState.DONE:
            return None
        return present.render("evaluation_live.html", detail=detail, spans=_spans(detail))

    return live(request, viewer, render)


@router.get("/evaluations/{evaluation_id}/files/{name}")
async def file(
    _: Viewer, gateway: CurrentGateway, evaluation_id: UUID, name: ArtifactName | Literal["receipt.json"]
) -> Response:
    """Return a part of an evaluation as a text file, which no browser executes."""
    if isinstance(name, ArtifactName):
        content = (await gateway.read(reports.show, evaluation_id)).files().get(name)
    else:
        content = await gateway.receipt(evaluation_id)
    if content is None:
        raise HttpError(404, "it has no verdict yet")
    content = content if isinstance(content, bytes) else content.encode("utf-8", "replace")
    filename = f"{str(evaluation_id)[:8]}-{name}"
    headers = {"Content-Disposition": f'attachment; filename="{filename}"'}
    return Response(content, media_type="text/plain; charset=utf-8", headers=headers)


@router.post("/evaluations/{evaluation_id}/cancel")
async def cancel(actor: Actor, gateway: CurrentGateway, evaluation_id: UUID) -> Response:
    """Cancel an evaluation. One that has its verdict keeps it."""
    await gateway.cancel(actor, evaluation_id)
    return RedirectResponse(f"/evaluations/{evaluation_id}", 303)


@router.post("/evaluations/{evaluation_id}/rerun")
async def rerun(actor: Actor, gateway: CurrentGateway, evaluation_id: UUID) -> Response:
    """Judge the same kernel again, and show the new evaluation."""
    return await _judge_again(gateway, actor, evaluation_id, lambda again: again)


@router.post("/evaluations/{evaluation_id}/sanitize")
async def sanitize(actor: Actor, gateway: CurrentGateway, evaluation_id: UUID) -> Response:
    """Run the kernel under all tools of compute-sanitizer, with the problem's own sizes."""
    tools = list(contract.Sanitizer)
    return await _judge_again(
        gateway, actor, evaluation_id, lambda again: examinations.sanitizing(again, tools, whole=True)[0]
    )


@router.post("/evaluations/{evaluation_id}/profile")
async def profile(actor: Actor, gateway: CurrentGateway, evaluation_id: UUID) -> Response:
    """Profile the kernel."""
    return await _judge_again(gateway, actor, evaluation_id, lambda again: examinations.profiling(again)[0])


@router.get("/evaluations/{evaluation_id}/roofline.svg")
async def roofline_picture(
    _: Viewer, gateway: CurrentGateway, evaluation_id: UUID, theme: Theme = Theme.LIGHT
) -> Response:
    """Draw the kernel's roofline chart."""
    detail = await gateway.read(reports.show, evaluation_id)
    taken, label = detail.verdict and detail.verdict.evidence.profile, detail.kernel_label or detail.kernel_hash[:12]
    return await picture(examinations.roofline(label, {label: taken} if taken else {}), theme)


async def _judge_again(
    gateway: Gateway, actor: Actor, evaluation_id: UUID, changed: Callable[[contract.Request], contract.Request]
) -> Response:
    """Submit an evaluation's request again with a change, and show the new evaluation."""
    detail = await gateway.read(reports.show, evaluation_id)
    again = detail.request(problem=f"sha256:{detail.problem_hash}", priority=actor.priority, reuse=False)
    return await submitted(gateway, actor, changed(again))


def _read(engine: Engine, evaluation_id: UUID, against: str | None, *, within_s: float) -> dict[str, Any]:
    detail = reports.show(engine, evaluation_id, within_s=within_s)
    verdict = detail.verdict
    listed = reports.listing(engine, problem=detail.problem_hash, limit=_OTHERS + 1)
    other = reports.show(engine, reports.resolve_id(engine, against)) if against else None
    if other is not None and other.problem_hash != detail.problem_hash:
        raise InvalidRequest(f"{other.evaluation_id} belongs to another problem")
    too_long = other is not None and differences.are_too_long(detail, other)
    changes = [] if other is None or too_long else differences.of_sources(detail, other)
    return {
        "detail": detail,
        "verdict": verdict,
        "words": verdict and feedback.describe(verdict, detail.kernel),
        "plots": _plots(verdict) if verdict else [],
        "heat": _heat(verdict.facts.map) if verdict and verdict.facts.map else None,
        "spans": _spans(detail),
        "sanitized": (verdict and verdict.evidence.sanitized) or (),
        "profiled": verdict and verdict.evidence.profile,
        "can_draw": can_draw(),
        "steps": _steps(verdict) if verdict else [],
        "environment": _environment(detail),
        "measures": [*figures.listed(verdict.evidence.isolation or ())] if verdict else [],
        "evidence": [*figures.listed(verdict.facts), *figures.listed(verdict.evidence)] if verdict else [],
        "log": verdict.log[-_LOG:] if verdict else "",
        "settings": json.dumps(detail.settings, indent=2, ensure_ascii=False),
        "kernel": present.source(detail.kernel),
        "problem": present.source(detail.problem),
        "statement": statement.of(detail.problem),
        "others": [row for row in listed if row.evaluation_id != evaluation_id][:_OTHERS],
        "other": other,
        "too_long": too_long,
        "changes": present.changes(changes[:_CHANGES]),
        "faster": differences.of_times(detail, other) if other else "",
    }


def _plots(verdict: contract.Verdict) -> list[Plot]:
    """Return the spreads of the kernel's and the references' times on one axis."""
    compiled = verdict.evidence.compiled_baseline
    taken = {
        "kernel": verdict.runtime,
        "reference": verdict.baseline,
        "torch.compile": None if isinstance(compiled, BaselineError) else compiled,
    }
    measured = {name: one for name, one in taken.items() if one is not None}
    # The axis ignores outliers, because one very long call would compress the rest.
    end = max((min(one.max_ms, 2 * one.q3_ms) for one in measured.values()), default=0.0)
    if end <= 0:
        return []

    def at(value: float) -> float:
        return round(min(100.0, max(0.0, 100 * value / end)), 2)

    plots: list[Plot] = []
    for name, one in measured.items():
        low, q1, median, q3, high = map(at, (one.min_ms, one.q1_ms, one.median_ms, one.q3_ms, one.max_ms))
        columns = _columns(one.histogram, at) if one.histogram else ()
        plots.append(Plot(name, one, low, q1, median, q3, high, columns))
    return plots


def _columns(histogram: Histogram, at: Callable[[float], float]) -> Sequence[Column]:
    counts = histogram.counts
    most = max(counts, default=0)
    bin_ms = (histogram.high_ms - histogram.low_ms) / max(len(counts), 1)
    columns: list[Column] = []
    for index, count in enumerate(counts):
        left, right = (at(histogram.low_ms + edge * bin_ms) for edge in (index, index + 1))
        if count:
            columns.append(Column(left, max(round(right - left, 2), 0.4), round(100 * count / most, 1)))
    return columns


def _heat(known: WrongMap) -> HeatMap:
    down, across = len(known.shares), len(known.shares[0])

    def span(first: int, last: int, cells: int, size: int) -> str:
        begin, end = first * size // cells, (last + 1) * size // cells - 1
        return f"{begin} to {end}" if begin < end else str(begin)

    wrong = [(i, j) for i, digits in enumerate(known.shares) for j, digit in enumerate(digits) if digit != "0"]
    words = "Each cell has wrong values."
    if 0 < len(wrong) < down * across:
        tall, wide = [i for i, _ in wrong], [j for _, j in wrong]
        words = (
            f"{len(wrong)} of {down * across} cells have wrong values: within rows"
            f" {span(min(tall), max(tall), down, known.rows)} and columns"
            f" {span(min(wide), max(wide), across, known.columns)}."
        )
    return HeatMap(
        [(span(i, i, down, known.rows), digits) for i, digits in enumerate(known.shares)],
        [span(j, j, across, known.columns) for j in range(across)],
        words,
    )


def _spans(detail: Detail) -> list[Span]:
    """Return the parts of an evaluation's life: attempts, and the waits before and between them."""
    now = datetime.now(UTC)
    end = detail.verdict.finished_at if detail.verdict else now
    begin = detail.submitted_at
    marks: list[tuple[str, str, datetime, datetime]] = []
    at = begin
    for attempt in detail.attempts:
        marks.append(("wait", "waited", at, attempt.started_at))
        at = attempt.ended_at or now
        marks.append(("run", f"attempt {attempt.number} on {attempt.worker}", attempt.started_at, at))
    marks.append(("wait", "waited", at, end))
    whole = max((end - begin).total_seconds(), 1e-3)
    spans: list[Span] = []
    for kind, name, start, stop in marks:
        seconds = (stop - start).total_seconds()
        if seconds > 0:
            offset = max(0.0, (start - begin).total_seconds())
            spans.append(Span(kind, name, round(100 * offset / whole, 2), round(100 * seconds / whole, 2), seconds))
    return spans


def _steps(verdict: contract.Verdict) -> list[tuple[str, float, float]]:
    """Return the steps of the last attempt: name, seconds, and duration relative to the longest step."""
    durations = verdict.evidence.durations_s or {}
    longest = max(durations.values(), default=0.0)
    return [(name, seconds, seconds / longest if longest > 0 else 0.0) for name, seconds in durations.items()]


def _environment(detail: Detail) -> list[tuple[str, str]]:
    recorded = (detail.attempts[-1].environment or {}).items() if detail.attempts else ()
    return [*figures.listed((detail.verdict and detail.verdict.environment) or recorded)]
