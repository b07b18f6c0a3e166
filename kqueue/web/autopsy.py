"""An evaluation's autopsy: begun on its page, run by this server, followed live, and shown with its `repro.py`.

Autopsies are kept in memory, the latest ones. Whoever begins one again after a restart has it soon: verdicts are used
again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final
from uuid import UUID

from fastapi import Request, Response
from fastapi.responses import RedirectResponse

from kqueue import contract
from kqueue.autopsy import coroutine, shrink
from kqueue.autopsy.report import Report
from kqueue.autopsy.shrink import Autopsy
from kqueue.errors import InvalidRequest, KqueueError, WaitTimeout
from kqueue.http import failures
from kqueue.http.failures import HttpError
from kqueue.http.gateway import Caller, Gateway
from kqueue.store import reports
from kqueue.store.tokens import Scope
from kqueue.web import present
from kqueue.web.live import live
from kqueue.web.route import Actor, Viewer, page, pages

router: Final = pages()

_log = logging.getLogger(__name__)

#: How long one may take, in seconds; evaluations of it that are judged beside each other.
_BUDGET_S: Final = 60.0
_WIDTH: Final = 4
#: How many may run at once, and how many are kept.
_MOST_RUNNING: Final = 4
_MOST_KEPT: Final = 64


@dataclass(eq=False)
class Running:
    """An autopsy, while it runs and when it has ended.

    Attributes:
        autopsy: what is known so far.
        task: runs it.
        report: what was found; None while it runs, and if it failed.
        failure: why it failed, in words.
    """

    autopsy: Autopsy
    task: asyncio.Task[None] | None = None
    report: Report | None = None
    failure: str = ""

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.report is not None or bool(self.failure)


class Autopsies:
    """The autopsies of one server, by their evaluations."""

    def __init__(self) -> None:
        self._known: dict[UUID, Running] = {}

    def find(self, evaluation_id: UUID) -> Running | None:
        """Return an evaluation's autopsy, if there is one."""
        return self._known.get(evaluation_id)

    def begin(self, gateway: Gateway, actor: Caller, evaluation_id: UUID, autopsy: Autopsy) -> None:
        """Begin an autopsy, unless the evaluation's runs already.

        Raises:
            HttpError: 429, as many run as may.
        """
        known = self.find(evaluation_id)
        if known is not None and not known.is_over:
            return
        if sum(not one.is_over for one in self._known.values()) >= _MOST_RUNNING:
            raise HttpError(429, f"{_MOST_RUNNING} autopsies run, the most that may at once: try again in a minute")
        self._known.pop(evaluation_id, None)
        while len(self._known) >= _MOST_KEPT:
            del self._known[next(name for name, one in self._known.items() if one.is_over)]
        running = self._known[evaluation_id] = Running(autopsy)
        running.task = asyncio.create_task(_run(gateway, actor, running))


async def _run(gateway: Gateway, actor: Caller, running: Running) -> None:
    """Run an autopsy to its end, or the server's."""
    judge = partial(_judge, gateway, actor, running.autopsy)
    work = asyncio.create_task(coroutine.dissect(running.autopsy, judge, _BUDGET_S))
    stopping = asyncio.create_task(gateway.stopping.wait())
    await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not work.done():
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        running.failure = "the server was stopped"
        return
    try:
        running.report = work.result()
    except (KqueueError, HttpError) as error:
        running.failure = failures.describe(error, "").detail
    except Exception:  # noqa: BLE001 -- whatever it was, the page must say that it is over
        _log.exception("an autopsy failed")
        running.failure = "it failed, and the server's log says why"


async def _judge(
    gateway: Gateway, actor: Caller, autopsy: Autopsy, requests: Sequence[contract.Request], until: float
) -> list[contract.Result | None]:
    """Have one round judged. What still waits when this server is gone ends by itself."""
    tickets = await gateway.submit(actor, requests)
    results: dict[int, contract.Result] = {}
    try:
        with suppress(WaitTimeout):
            async for ticket, verdict in gateway.client.as_completed(tickets, max(0.0, until - time.monotonic())):
                results[tickets.index(ticket)] = verdict
                if autopsy.settled(results, len(tickets)):
                    break
    finally:
        for place, ticket in enumerate(tickets):
            if place not in results and not gateway.stopping.is_set():
                await ticket.cancel()
    return [results.get(place) for place in range(len(tickets))]


def refusal(verdict: contract.Verdict | None) -> str | None:
    """Return why an evaluation can have no autopsy; None if it can."""
    return "it has no verdict yet" if verdict is None else shrink.refused(verdict)


@router.post("/evaluations/{evaluation_id}/autopsy")
async def begin(request: Request, actor: Actor, evaluation_id: UUID) -> Response:
    """Look for the smallest input on which the kernel fails."""
    gateway: Gateway = request.app.state.gateway
    if not actor.may(Scope.PROBLEMS):
        raise HttpError(
            403, f"it submits smaller problems: this needs a login with a token of the scope {Scope.PROBLEMS}"
        )
    detail = await gateway.read(reports.show, evaluation_id)
    if (why := refusal(detail.verdict)) is not None:
        raise InvalidRequest(f"no autopsy: {why}")
    again = detail.request(batch=f"autopsy-{evaluation_id}", priority=actor.priority)
    autopsies: Autopsies = request.app.state.autopsies
    autopsies.begin(gateway, actor, evaluation_id, Autopsy(again, detail.verdict, width=_WIDTH))
    return RedirectResponse(f"/evaluations/{evaluation_id}/autopsy", 303)


@router.get("/evaluations/{evaluation_id}/autopsy")
async def autopsy(request: Request, viewer: Viewer, evaluation_id: UUID) -> Response:
    """Show what is known of an evaluation's autopsy."""
    gateway: Gateway = request.app.state.gateway
    detail = await gateway.read(reports.show, evaluation_id)
    running = of(request, evaluation_id)
    found = running.report.repro if running and running.report else None
    return page(
        request,
        "autopsy.html",
        detail=detail,
        running=running,
        refusal=refusal(detail.verdict),
        may_begin=viewer.may(Scope.PROBLEMS),
        repro=present.source(found) if found else "",
    )


@router.get("/live/evaluations/{evaluation_id}/autopsy")
async def autopsy_live(request: Request, viewer: Viewer, evaluation_id: UUID) -> Response:
    """Send how far an autopsy is whenever that changes, until it is over."""

    async def render() -> str | None:
        running = of(request, evaluation_id)
        if running is None or running.is_over:
            return None
        return present.render("autopsy_live.html", running=running)

    return live(request, viewer, render)


@router.get("/evaluations/{evaluation_id}/autopsy/repro.py")
async def repro(request: Request, _: Viewer, evaluation_id: UUID) -> Response:
    """Return the program that shows the failure, as a file."""
    running = of(request, evaluation_id)
    if running is None or running.report is None or running.report.repro is None:
        raise HttpError(404, "there is no repro.py: the autopsy runs still, found none, or is no longer known")
    headers = {"Content-Disposition": 'attachment; filename="repro.py"'}
    return Response(running.report.repro.encode(), media_type="text/plain; charset=utf-8", headers=headers)


def of(request: Request, evaluation_id: UUID) -> Running | None:
    """Return an evaluation's autopsy, if this server knows one."""
    autopsies: Autopsies = request.app.state.autopsies
    return autopsies.find(evaluation_id)
