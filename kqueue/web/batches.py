"""The pages of batches: a list, the progress and results of each batch, and throughput and pass rate over days."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final

from fastapi import Request, Response
from sqlalchemy import Engine

from kqueue import charts, figures, registry
from kqueue.charts import Theme
from kqueue.errors import UnknownEvaluation
from kqueue.store import reports
from kqueue.store.engine import together
from kqueue.store.reports import BatchState, By, Day, Listed, batches, boards, curves
from kqueue.store.reports.batches import KnownBatch
from kqueue.web.export import MOST_ROWS, Format, FormatQuery, as_file, one_page
from kqueue.web.parameters import BatchName, CurrentGateway, TextFilter, given_filters
from kqueue.web.pictures import can_draw, picture
from kqueue.web.route import Viewer, page, pages

router: Final = pages()

_PAGE: Final = 50
_SINCE: Final = "30d"
#: Maximum number of evaluations of a batch whose cost is always shown. A larger sum is computed on request.
_CHEAP: Final = 2000
#: Length of the recent past whose rate is used for the estimate of the remaining time.
_LOOKED_BACK: Final = timedelta(minutes=10)
#: Values of p in the table of KernelBench's fast_p.
_FAST_P: Final = (0.0, 0.5, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0)


@router.get("/batches")
async def known(
    request: Request, _: Viewer, gateway: CurrentGateway, name: TextFilter = None, form: FormatQuery = Format.HTML
) -> Response:
    """Show batches, the latest submission first."""
    limit = _PAGE if form is Format.HTML else MOST_ROWS
    rows = await gateway.read(batches.known_batches, beginning=name or "", limit=limit)
    if form is not Format.HTML:
        return await as_file(form, "batches", KnownBatch, one_page(rows))
    return page(request, "batches.html", rows=rows, asked=given_filters(name=name), most=_PAGE)


@router.get("/days")
async def days(
    request: Request,
    _: Viewer,
    gateway: CurrentGateway,
    since: TextFilter = None,
    batch: TextFilter = None,
    form: FormatQuery = Format.HTML,
) -> Response:
    """Show the verdicts of each day, of all evaluations or of the batches whose names begin with ``batch``."""
    rows = await gateway.read(reports.days, since=figures.since(since or _SINCE, "since"), batch=batch or "")
    if form is not Format.HTML:
        return await as_file(form, "days", Day, one_page(rows))
    asked = given_filters(since=since, batch=batch)
    most = max((row.total for row in rows), default=0)
    return page(request, "days.html", rows=rows, asked=asked, since=since or _SINCE, most=max(most, 1))


@router.get("/batches/{batch:path}/fast-p.svg")
async def fast_p_picture(_: Viewer, gateway: CurrentGateway, batch: BatchName, theme: Theme = Theme.LIGHT) -> Response:
    """Draw KernelBench's fast_p of a batch."""
    fast = await gateway.read(curves.fast_p, batch)
    return await picture(charts.FastP(batch, fast.speedups, fast.problems), theme)


@router.get("/batches/{batch:path}")
async def one(
    request: Request,
    viewer: Viewer,
    gateway: CurrentGateway,
    batch: BatchName,
    cost: bool = False,
    form: FormatQuery = Format.HTML,
) -> Response:
    """Show a batch."""
    if form is not Format.HTML:
        await gateway.read(_state, batch)
        return await as_file(form, "batch", Listed, gateway.pages(viewer, reports.listing, batch=batch))
    fields = await gateway.read(_read, batch, with_cost=cost)
    return page(
        request, "batch.html", name=batch, looked_back_s=_LOOKED_BACK.total_seconds(), can_draw=can_draw(), **fields
    )


def _state(engine: Engine, batch: str) -> BatchState:
    """Return the progress of a batch, or raise UnknownEvaluation for an unknown name."""
    state = reports.batch_state(engine, batch)
    if state is None:
        raise UnknownEvaluation(batch, what="the batch")
    return state


def _read(engine: Engine, batch: str, *, with_cost: bool) -> dict[str, Any]:
    with together(engine):
        state = _state(engine, batch)
        fast = curves.fast_p(engine, batch)
        adds_up = with_cost or state.total <= _CHEAP
        return {
            "state": state,
            "left_s": _left_s(engine, batch, state),
            "fast": [(p, sum(p == 0 or one > p for one in fast.speedups)) for p in _FAST_P],  # all for p = 0
            "problems": fast.problems,
            "best": boards.best_of_batch(engine, batch),
            "faults": batches.batch_faults(engine, batch, state.categories),
            "cost": next(iter(reports.cost(engine, by=By.BATCH, since=None, batch=batch)), None) if adds_up else None,
            "is_dear": not adds_up,
            "latest": reports.listing(engine, batch=batch, limit=10),
            "attached": [words for part in registry.attached("batch") if (words := part(engine, batch))],
            "others": [one for one in batches.known_batches(engine, limit=_PAGE) if one.name != batch],
        }


def _left_s(engine: Engine, batch: str, state: BatchState) -> float | None:
    """Return the seconds until the batch ends at its recent rate, or None if that is zero or the batch has ended."""
    if state.done == state.total:
        return None
    recent = batches.ended_since(engine, batch, since=datetime.now(UTC) - _LOOKED_BACK)
    return (state.total - state.done) * _LOOKED_BACK.total_seconds() / recent if recent else None
