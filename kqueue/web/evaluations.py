"""Lists of evaluations, with filters in the URL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final
from uuid import UUID

from fastapi import Request, Response

from kqueue import backends, figures
from kqueue.categories import Blame, Category
from kqueue.errors import InvalidRequest
from kqueue.http import cursors
from kqueue.http.gateway import Gateway
from kqueue.states import EvaluationState
from kqueue.store import reports
from kqueue.web.route import Viewer, page, pages

router: Final = pages()

_PAGE: Final = 50
#: Filters whose values are fixed. The filter `backend` has the registered names.
_CHOICES: Final[dict[str, type[StrEnum]]] = {
    "state": EvaluationState,
    "category": Category,
    "blame": Blame,
}
#: Filters with any text as value.
_TEXTS: Final = ("problem", "lane", "batch", "producer")
_LONGEST: Final = 200


@router.get("/evaluations")
async def evaluations(request: Request, _: Viewer) -> Response:
    """Show evaluations, the latest submission first."""
    asked = {
        name: value for name in (*_choices(), *_TEXTS, "since") if (value := request.query_params.get(name, "").strip())
    }
    cursor = request.query_params.get("cursor")
    gateway: Gateway = request.app.state.gateway
    since = asked.get("since")
    listed = await gateway.read(
        reports.listing,
        since=None if since is None else figures.since(since, "since"),
        after=None if not cursor else cursors.read(cursor, UUID),
        limit=_PAGE + 1,
        **_filters(asked),
    )
    rows, more = cursors.page(listed, _PAGE, lambda one: (one.submitted_at, one.evaluation_id))
    return page(
        request,
        "evaluations.html",
        rows=rows,
        asked=asked,
        choices=_choices(),
        texts=_TEXTS,
        is_first=not cursor,
        more=more,
    )


def _choices() -> Mapping[str, Sequence[str]]:
    """Return the values of each filter that has a set of values."""
    return {name: list(kind) for name, kind in _CHOICES.items()} | {"backend": backends.names()}


def _filters(asked: dict[str, str]) -> dict[str, Any]:
    """Return the arguments for :class:`kqueue.store.reports.Filters`, or raise InvalidRequest for a wrong value."""
    filters: dict[str, Any] = {}
    choices = _choices()
    for name, value in asked.items():
        if len(value) > _LONGEST or "\0" in value:
            raise InvalidRequest(f"{name}: must have at most {_LONGEST} characters and no NUL")
        if name in choices:
            if value not in choices[name]:
                raise InvalidRequest(f"{name}: use one of {', '.join(choices[name])}")
            filters[name] = _CHOICES.get(name, str)(value)
        elif name in _TEXTS:
            filters[name] = value
    return filters
