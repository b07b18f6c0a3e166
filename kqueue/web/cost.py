"""The cost of evaluations, grouped by producer, batch, problem, lane or day."""

from __future__ import annotations

from asyncio import Semaphore
from typing import Any, Final

from fastapi import Request, Response
from sqlalchemy import Engine

from kqueue import figures
from kqueue.store import budgets, reports, tokens
from kqueue.store.engine import together
from kqueue.store.reports import By, Cost
from kqueue.web.export import Format, FormatQuery, as_file, one_page
from kqueue.web.parameters import CurrentGateway, TextFilter, given_filters
from kqueue.web.route import Viewer, page, pages

router: Final = pages()

#: Lock that runs one sum at a time, so that long sums do not occupy all threads for reads.
_turn: Final = Semaphore(1)
_MOST: Final = 100
_FILE_MOST: Final = 10_000


@router.get("/cost")
async def cost(
    request: Request,
    _: Viewer,
    gateway: CurrentGateway,
    by: By | None = None,
    since: TextFilter = None,
    form: FormatQuery = Format.HTML,
) -> Response:
    """Show the cost of evaluations. It is added up only after a user selects a grouping, because it can take long."""
    asked = given_filters(by=by, since=since)
    after = figures.since(since or "1d", "since")
    if form is not Format.HTML:
        async with _turn:
            rows = await gateway.read(reports.cost, by=by or By.PRODUCER, since=after, limit=_FILE_MOST)
        return await as_file(form, f"cost-by-{by or By.PRODUCER}", Cost, one_page(rows))
    fields: dict[str, Any] = {"rows": None, "names": {}, "budgets": {}}
    if by is not None:
        async with _turn:
            fields = await gateway.read(_read, by=by, since=after)
    return page(request, "cost.html", asked=asked, kinds=list(By), most=_MOST, **fields)


def _read(engine: Engine, **wanted: Any) -> dict[str, Any]:
    with together(engine):
        rows = reports.cost(engine, limit=_MOST, **wanted)
        if wanted["by"] is not By.PRODUCER:
            return {"rows": rows, "names": {}, "budgets": {}}
        payers = {row.key: payer for row in rows if (payer := budgets.token_of(row.key)) is not None}
        known_budgets = budgets.of(engine, set(payers.values()))
        return {
            "rows": rows,
            "names": {f"{budgets.PRODUCER}{token.id}": token.name for token in tokens.listing(engine)},
            "budgets": {key: known_budgets[payer] for key, payer in payers.items() if payer in known_budgets},
        }
