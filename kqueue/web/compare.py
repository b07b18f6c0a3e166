"""Two kernels side by side, two batches (broken, fixed, slower and faster kernels), and problems by batches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Final

from fastapi import Path, Request, Response
from sqlalchemy import Engine

from kqueue import charts, differences
from kqueue.charts import Theme
from kqueue.contract import HASH
from kqueue.evidence import Measurement
from kqueue.store import reports
from kqueue.store.reports import Detail, batches, boards
from kqueue.web import present
from kqueue.web.parameters import CurrentGateway, TextFilter, given_filters
from kqueue.web.pictures import can_draw, picture
from kqueue.web.route import Viewer, page, pages

router: Final = pages()

_CHANGES: Final = 3000
#: Maximum number of batches that the form offers, and of rows in a table of pairs.
_BATCHES: Final = 50
_PAIRS: Final = 200
#: Maximum number of batches and of problems in the matrix.
_COLUMNS: Final = 8
_ROWS: Final = 500
#: An evaluation's id or its first digits, or a kernel's whole hash.
_Which = Annotated[str, Path(max_length=64)]


@router.get("/compare")
async def compare_batches(
    request: Request, _: Viewer, gateway: CurrentGateway, first: TextFilter = None, second: TextFilter = None
) -> Response:
    """Show the changes from one batch to another, or a form for their names."""
    changes = None if first is None or second is None else await gateway.read(reports.changes, first, second)
    known = await gateway.read(batches.known_batches, limit=_BATCHES)
    names: dict[str, Any] = {"first": first or "", "second": second or ""}
    return page(request, "batches_compared.html", changes=changes, known=known, most=_PAIRS, **names)


@router.get("/matrix")
async def matrix(request: Request, _: Viewer, gateway: CurrentGateway, name: TextFilter = None) -> Response:
    """Show problems by batches: the latest ones, or those with names that begin so."""
    known = await gateway.read(batches.known_batches, beginning=name or "", limit=_COLUMNS)
    names = [batch.name for batch in reversed(known)]
    rows = dict[str, dict[str, batches.Cell]]()
    for cell in await gateway.read(batches.matrix, names):
        rows.setdefault(cell.problem_hash, {})[cell.batch] = cell
    return page(request, "matrix.html", rows=rows, names=names, asked=given_filters(name=name), most=_ROWS)


@router.get("/compare/{first}/{second}/times.svg")
async def times_picture(
    _: Viewer, gateway: CurrentGateway, first: _Which, second: _Which, theme: Theme = Theme.LIGHT
) -> Response:
    """Draw the spreads of both kernels' times."""
    pair = await gateway.read(_pair, first, second)
    return await picture(charts.Times.of("times of one call", _times(pair)), theme)


@router.get("/compare/{first}/{second}")
async def compare(request: Request, _: Viewer, gateway: CurrentGateway, first: _Which, second: _Which) -> Response:
    """Show two kernels, given by evaluations or by hashes. A hash stands for its best or last evaluation."""
    return page(request, "compare.html", can_draw=can_draw(), **await gateway.read(_read, first, second))


def _read(engine: Engine, first: str, second: str) -> dict[str, Any]:
    pair = _pair(engine, first, second)
    columns, too_long = [dict(_properties(detail)) for detail in pair], differences.are_too_long(*pair)
    changes = [] if too_long else differences.of_sources(*pair)
    return {
        "pair": pair,
        "rows": [(name, [column[name] for column in columns]) for name in columns[0]],
        "times": _times(pair),
        "too_long": too_long,
        "changes": present.changes(changes[:_CHANGES]),
        "left_out": max(0, len(changes) - _CHANGES),
        "faster": differences.of_times(*pair),
        "sources": [present.source(detail.kernel) for detail in pair],
    }


def _pair(engine: Engine, first: str, second: str) -> tuple[Detail, Detail]:
    one, other = (
        boards.evaluation_of(engine, which) if re.fullmatch(HASH, which) else reports.resolve_id(engine, which)
        for which in (first, second)
    )
    return reports.show(engine, one), reports.show(engine, other)


def _properties(detail: Detail) -> Iterator[tuple[str, str]]:
    verdict = detail.verdict
    yield "problem", detail.problem_label or detail.problem_hash[:12]
    yield "kernel", f"{detail.kernel_label or ''} {detail.kernel_hash[:12]}"
    yield "backend", detail.backend
    yield "lane", detail.lane
    yield "precision", str(detail.settings.get("precision", ""))
    yield "device", (verdict.environment.device or "") if verdict and verdict.environment else ""
    yield "batch", detail.batch or ""
    yield "message", verdict.message if verdict else ""


def _times(pair: tuple[Detail, Detail]) -> list[tuple[str, Measurement]]:
    """Return the measurements of both kernels and of their references."""
    times: list[tuple[str, Measurement]] = []
    for name, detail in zip(("first", "second"), pair, strict=True):
        verdict = detail.verdict
        if verdict is not None and verdict.runtime is not None:
            times.append((f"the {name}", verdict.runtime))
        if verdict is not None and verdict.baseline is not None:
            times.append((f"the {name}’s reference", verdict.baseline))
    return times
