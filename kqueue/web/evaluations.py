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
async def evaluations(request: Request, _: Viewer, gateway: CurrentGateway) -> Response:
    """Show running evaluations, then the latest verdicts, or the evaluations in one state by submission."""
    asked = _asked(request)
    fields = await gateway.read(_read, _wanted(request, asked))
    return page(request, "evaluations.html", asked=asked, choices=_choices(), texts=_TEXTS, **fields)


@router.get("/live/evaluations")
async def evaluations_live(request: Request, viewer: Viewer, gateway: CurrentGateway) -> Response:
    """Send the first page of a list after each change."""
    asked = _asked(request)
    wanted = _wanted(request, asked)

    async def render() -> str:
        return present.render("evaluations_live.html", asked=asked, **await gateway.read(_read, wanted))

    return live(request, viewer, render)


def _asked(request: Request) -> dict[str, str]:
    given = {name: request.query_params.get(name, "").strip() for name in (*_choices(), *_TEXTS)}
    return {name: value for name, value in given.items() if value}


def _read(engine: Engine, wanted: _Wanted) -> dict[str, Any]:
    """Return the fields of the list's template.

    Without a state the verdicts are listed by their time, so that a long queue does not hide them.
    """
    with together(engine):
        since, after = wanted.since, wanted.after
        batch = wanted.filters.get("batch")
        filters: Filters = {**wanted.filters, "batch": batches.names(engine, str(batch)) if batch else None}
        state = filters.get("state")
        running: Sequence[Listed] = []
        if state in (None, EvaluationState.DONE):
            listed = reports.results(engine, since=since, after=after, limit=_PAGE + 1, **filters)
            rows, more = cursors.page(
                listed, _PAGE, lambda one: (one.finished_at or one.submitted_at, one.evaluation_id)
            )
            if state is None and after is None:
                running = reports.listing(
                    engine, since=since, limit=_PAGE, **filters | {"state": EvaluationState.RUNNING}
                )
        else:
            listed = reports.listing(engine, since=since, after=after, limit=_PAGE + 1, **filters)
            rows, more = cursors.page(listed, _PAGE, lambda one: (one.submitted_at, one.evaluation_id))
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
