"""The pages of problems: a list, and the leaderboard of each problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, Literal
from urllib.parse import parse_qsl

from fastapi import Path, Request, Response
from sqlalchemy import Engine

from kqueue import backends, charts, plots, statement
from kqueue.charts import Theme
from kqueue.contract import HASH, Precision, parse_request
from kqueue.errors import UnknownProblem
from kqueue.http import cursors
from kqueue.http.failures import HttpError
from kqueue.plots import Kinds
from kqueue.store import reports, sharing
from kqueue.store.engine import together
from kqueue.store.reports import boards
from kqueue.store.reports.boards import Placed, UsedProblem
from kqueue.web import present
from kqueue.web.export import Format, FormatQuery, as_file, one_page
from kqueue.web.parameters import BackendFilter, CurrentGateway, PrecisionFilter, TextFilter, given_filters
from kqueue.web.pictures import can_draw, picture
from kqueue.web.route import Actor, Viewer, page, pages, submitted

router: Final = pages()

_PAGE: Final = 25
_BOARD: Final = 50
#: Maximum number of rows in the file of a leaderboard.
_FILE_BOARD: Final = 10_000
_Hash = Annotated[str, Path(pattern=f"^{HASH}$")]
_Kind = Literal["best", "board", "roofline"]


@router.get("/problems")
async def problems(
    request: Request,
    viewer: Viewer,
    gateway: CurrentGateway,
    name: TextFilter = None,
    cursor: TextFilter = None,
    form: FormatQuery = Format.HTML,
) -> Response:
    """Show stored problems, the latest first."""
    after = None if cursor is None else cursors.read(cursor, cursors.checked_hash)
    if form is not Format.HTML:
        return await as_file(form, "problems", UsedProblem, gateway.pages(viewer, boards.used_problems, named=name))
    listed = await gateway.read(boards.used_problems, named=name, after=after, limit=_PAGE + 1)
    rows, more = cursors.page(listed, _PAGE, lambda one: (one.created_at, one.problem_hash))
    return page(
        request,
        "problems.html",
        rows=rows,
        asked=given_filters(name=name),
        shared=[] if name or cursor else await gateway.read(sharing.listing, sources=False),
        is_first=cursor is None,
        more=more,
        counted=boards.COUNTED,
    )


@router.get("/problems/{problem_hash}/{kind}.svg")
async def problem_picture(
    _: Viewer, gateway: CurrentGateway, problem_hash: _Hash, kind: _Kind, theme: Theme = Theme.LIGHT
) -> Response:
    """Draw the best speedup over time, the fastest kernels, or the rooflines of the profiled kernels."""
    return await picture(await gateway.read(_chart, problem_hash, kind), theme)


@router.get("/problems/{problem_hash}")
async def problem(
    request: Request,
    _: Viewer,
    gateway: CurrentGateway,
    problem_hash: _Hash,
    precision: PrecisionFilter = None,
    device: TextFilter = None,
    backend: BackendFilter = None,
    form: FormatQuery = Format.HTML,
) -> Response:
    """Show a problem: its leaderboard, its baselines, the outcomes of its evaluations, and its source."""
    filters: dict[str, Any] = {"precision": precision, "device": device, "backend": backend}
    if form is not Format.HTML:
        await gateway.read(_stored, problem_hash)
        rows = await gateway.read(boards.leaderboard, problem_hash, limit=_FILE_BOARD, **filters)
        return await as_file(form, f"leaderboard-{problem_hash[:12]}", Placed, one_page(rows))
    fields = await gateway.read(_read, problem_hash, filters)
    return page(
        request,
        "problem.html",
        asked=given_filters(**filters),
        choices={"precision": list(Precision), "backend": list(backends.registered())},
        can_draw=can_draw(),
        **fields,
    )


@router.post("/problems/{problem_hash}/kernels")
async def judge(request: Request, actor: Actor, gateway: CurrentGateway, problem_hash: _Hash) -> Response:
    """Judge a kernel that was entered, and show its evaluation."""
    entered = parse_qsl((await request.body()).decode("utf-8", "replace"), max_num_fields=10)
    fields = {name: value for name, value in entered if name in ("kernel", "backend", "lane", "kernel_label")}
    wanted = parse_request(fields | {"problem": f"sha256:{problem_hash}", "priority": actor.priority})
    return await submitted(gateway, actor, wanted)


def _stored(engine: Engine, problem_hash: str) -> reports.ProblemDetail:
    """Return a stored problem with its source, or raise an HttpError of status 404."""
    try:
        return reports.problem(engine, problem_hash)
    except UnknownProblem:
        raise HttpError(404, f"no stored problem has the hash {problem_hash}") from None


def _chart(engine: Engine, problem_hash: str, kind: str) -> charts.Chart:
    def read(report: Callable[..., Any], *args: Any, **more: Any) -> Any:
        return report(engine, *args, **more)

    _stored(engine, problem_hash)
    _, fitting = plots.of_problem(read, problem_hash)
    if (make := fitting.get(Kinds("leaderboard" if kind == "board" else kind))) is None:
        raise HttpError(404, f"the problem {problem_hash} has nothing to draw in this way")
    return make()


def _read(engine: Engine, problem_hash: str, filters: dict[str, Any]) -> dict[str, Any]:
    with together(engine):
        stored = _stored(engine, problem_hash)
        rows = boards.leaderboard(engine, problem_hash, limit=_BOARD + 1, **filters)
        counts = reports.outcomes(engine, problem_hash=problem_hash)
        return {
            "problem": stored,
            "source": present.source(stored.source),
            "statement": statement.of(stored.source),
            "inputs": reports.inputs_of(engine, problem_hash),
            "rows": rows[:_BOARD],
            "entries": sharing.board(engine, problem_hash, limit=_BOARD),
            "is_cut": len(rows) > _BOARD,
            "records": boards.records(engine, problem_hash),
            "baselines": boards.baselines_of(engine, problem_hash),
            "profiled": boards.profiled(engine, problem_hash),
            "counts": counts,
            "total": sum(counts.values()),
            "latest": reports.listing(engine, problem=problem_hash, limit=10),
        }
