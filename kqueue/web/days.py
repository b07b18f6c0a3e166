"""Throughput and pass rate over days."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import Query, Request, Response

from kqueue import figures
from kqueue.store import reports
from kqueue.store.reports import Day
from kqueue.web.export import Format, as_file, one_page
from kqueue.web.parameters import CurrentGateway, TextFilter, given_filters
from kqueue.web.route import Viewer, page, pages

router: Final = pages()
_SINCE: Final = "30d"


@router.get("/days")
async def days(
    request: Request,
    _: Viewer,
    gateway: CurrentGateway,
    since: TextFilter = None,
    batch: TextFilter = None,
    form: Annotated[Format, Query(alias="format")] = Format.HTML,
) -> Response:
    """Show the verdicts of each day, of all evaluations or of the batches whose names begin with ``batch``."""
    begin = figures.since(since or _SINCE, "since")
    rows = await gateway.read(reports.days, since=begin, batch=batch or "")
    if form is not Format.HTML:
        return await as_file(form, "days", Day, one_page(rows))
    asked = given_filters(since=since, batch=batch)
    most = max((row.total for row in rows), default=0)
    return page(request, "days.html", rows=rows, asked=asked, since=since or _SINCE, most=max(most, 1))
