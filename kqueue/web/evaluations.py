"""Lists of evaluations, with filters in the URL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from fastapi import Request, Response
from sqlalchemy import Engine

from kqueue import figures
from kqueue.errors import InvalidRequest
from kqueue.filters import FILTERS, HINTS, Filters, choices
from kqueue.http import cursors
from kqueue.states import EvaluationState
from kqueue.store import reports
from kqueue.store.engine import together
from kqueue.store.reports import Listed, batches
from kqueue.web import present
from kqueue.web.export import Format, FormatQuery, as_file
from kqueue.web.live import live
from kqueue.web.parameters import CurrentGateway
from kqueue.web.route import Viewer, page, pages

router: Final = pages()

_PAGE: Final = 50
#: Hints for the fields of filters with any text.
_TEXTS: Final = {**HINTS, "since": "2h, 7d, 2026-01-31"}
_LONGEST: Final = 200


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The conditions of a list, from its URL."""

    filters: Filters
    since: datetime | None
    after: tuple[datetime, UUID] | None


@router.get("/evaluations")
async def evaluations(
    request: Request, viewer: Viewer, gateway: CurrentGateway, form: FormatQuery = Format.HTML
) -> Response:
    """Show running evaluations, then the latest verdicts. In one state, and in a file, all are by submission."""
    wanted = _wanted(request, asked := _asked(request))
    if form is not Format.HTML:
        filters = await gateway.read(_filters, wanted)
        rows = gateway.pages(viewer, reports.listing, since=wanted.since, **filters)
        return await as_file(form, "evaluations", Listed, rows)
    fields = await gateway.read(_read, wanted)
    return page(request, "evaluations.html", asked=asked, choices=_choices(), texts=_TEXTS, **fields)


@router.get("/live/evaluations")
async def evaluations_live(request: Request, viewer: Viewer, gateway: CurrentGateway) -> Response:
    """Send the first page of a list after each change."""
    wanted = _wanted(request, asked := _asked(request))

    async def render() -> str:
        return present.render("evaluations_live.html", asked=asked, **await gateway.read(_read, wanted))

    return live(request, viewer, render)


def _asked(request: Request) -> dict[str, str]:
    given = {name: request.query_params.get(name, "").strip() for name in (*_choices(), *_TEXTS)}
    return {name: value for name, value in given.items() if value}


def _filters(engine: Engine, wanted: _Wanted) -> Filters:
    batch = wanted.filters.get("batch")
    return {**wanted.filters, "batch": batches.names(engine, str(batch)) if batch else None}


def _read(engine: Engine, wanted: _Wanted) -> dict[str, Any]:
    """Return the fields of the list's template.

    Without a state the verdicts are listed by their time, so that a long queue does not hide them.
    """
    with together(engine):
        since, after, filters = wanted.since, wanted.after, _filters(engine, wanted)
        state = filters.get("state")
        report = reports.results if state in (None, EvaluationState.DONE) else reports.listing
        listed = report(engine, since=since, after=after, limit=_PAGE + 1, **filters)
        rows, more = cursors.page(listed, _PAGE, lambda one: (one.finished_at or one.submitted_at, one.evaluation_id))
        running = list[Listed]()
        if state is None and after is None:
            running = reports.listing(engine, since=since, limit=_PAGE, **filters | {"state": EvaluationState.RUNNING})
        queued = reports.queued(engine, **filters) if state is None else 0
        return {"rows": [*running, *rows], "queued": queued, "is_first": after is None, "more": more}


def _choices() -> Mapping[str, Sequence[str]]:
    """Return the values of each filter that has a set of values."""
    return {name: choices(name) for name in FILTERS if name not in HINTS and name != "parts"}


def _wanted(request: Request, asked: Mapping[str, str]) -> _Wanted:
    """Return the conditions of a list, or raise InvalidRequest for a wrong value."""
    for name, value in asked.items():
        if len(value) > _LONGEST or "\0" in value:
            raise InvalidRequest(f"{name}: must have at most {_LONGEST} characters and no NUL")
        if (values := _choices().get(name)) and value not in values:
            raise InvalidRequest(f"{name}: use one of {', '.join(values)}")
    filters: dict[str, Any] = {name: value for name, value in asked.items() if name != "since"}
    since, cursor = asked.get("since"), request.query_params.get("cursor")
    return _Wanted(
        Filters(**filters, parts=True),
        None if since is None else figures.since(since, "since"),
        None if not cursor else cursors.read(cursor, UUID),
    )
