"""Autopsies of evaluations: a page starts one, this server runs it, and the page shows its progress and `repro.py`.

The latest autopsies are kept in memory. After a restart a repeated autopsy is fast, because it reuses verdicts.
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
from markupsafe import Markup
from sqlalchemy import Engine

from kqueue import contract
from kqueue.errors import InvalidRequest, KqueueError, WaitTimeout
from kqueue.features.autopsy import run, shrink
from kqueue.features.autopsy.report import Report
from kqueue.features.autopsy.shrink import Autopsy
from kqueue.http import failures
from kqueue.http.failures import HttpError
from kqueue.http.gateway import Caller, Gateway
from kqueue.store import evaluations, reports
from kqueue.store.tokens import Scope
from kqueue.web import present
from kqueue.web.live import live
from kqueue.web.parameters import CurrentGateway
from kqueue.web.route import Actor, Viewer, page, pages

router: Final = pages()

_log = logging.getLogger(__name__)

#: Maximum seconds of one autopsy.
_BUDGET_S: Final = 60.0
#: Number of evaluations of one autopsy that are judged concurrently.
_WIDTH: Final = 4
#: Maximum number of autopsies that run at once, and that are kept.
_MOST_RUNNING: Final = 4
_MOST_KEPT: Final = 64


@dataclass(eq=False)
class Running:
    """An autopsy that runs or has ended, with its report, or the reason why it failed."""

    autopsy: Autopsy
    task: asyncio.Task[None] | None = None
    report: Report | None = None
    failure: str = ""

    @property
    def is_over(self) -> bool:
        """True if it has ended."""
        return self.report is not None or bool(self.failure)


class Autopsies:
    """The autopsies of one server, by evaluation."""

    def __init__(self) -> None:
        self._known: dict[UUID, Running] = {}

    def find(self, evaluation_id: UUID) -> Running | None:
        """Return an evaluation's autopsy, if there is one."""
        return self._known.get(evaluation_id)

    def begin(self, gateway: Gateway, actor: Caller, evaluation_id: UUID, autopsy: Autopsy) -> None:
        """Begin an autopsy, unless the evaluation already has a running one. Raise an HttpError 429 at the limit."""
        earlier = self.find(evaluation_id)
        if earlier is not None and not earlier.is_over:
            return
        if sum(not one.is_over for one in self._known.values()) >= _MOST_RUNNING:
            raise HttpError(429, f"{_MOST_RUNNING} autopsies run, which is the limit: try again in a minute")
        self._known.pop(evaluation_id, None)
        while len(self._known) >= _MOST_KEPT:
            del self._known[next(name for name, one in self._known.items() if one.is_over)]
        running = self._known[evaluation_id] = Running(autopsy)
        running.task = asyncio.create_task(_run(gateway, actor, running))


async def _run(gateway: Gateway, actor: Caller, running: Running) -> None:
    """Run an autopsy until it ends or the server stops."""
    judge = partial(_judge, gateway, actor, running.autopsy)
    work = asyncio.create_task(run.dissect(running.autopsy, judge, _BUDGET_S))
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
    except Exception:  # noqa: BLE001 -- the page must show the end of the autopsy after any error
        _log.exception("an autopsy failed")
        running.failure = "it failed, and the server's log has the reason"


async def _judge(
    gateway: Gateway, actor: Caller, autopsy: Autopsy, requests: Sequence[contract.Request], until: float
) -> list[contract.Result | None]:
    """Submit one round of requests and return their results. Evaluations that remain when the server stops continue."""
    tickets = await gateway.submit(actor, requests)
    results: dict[int, contract.Result] = {}
    try:
        with suppress(WaitTimeout):
            async for ticket, verdict in gateway.client.as_completed(tickets, max(0.0, until - time.monotonic())):
                results[tickets.index(ticket)] = verdict
                if autopsy.settled(results, len(tickets)):
                    break
    finally:
        for index, ticket in enumerate(tickets):
            if index not in results and not gateway.stopping.is_set():
                await ticket.cancel()
    return [results.get(index) for index in range(len(tickets))]


def _refusal(verdict: contract.Verdict | None) -> str | None:
    """Return the reason why an evaluation can have no autopsy, or None if it can."""
    return "it has no verdict yet" if verdict is None else shrink.refused(verdict)


@router.post("/evaluations/{evaluation_id}/autopsy")
async def begin(request: Request, actor: Actor, gateway: CurrentGateway, evaluation_id: UUID) -> Response:
    """Start a search for the smallest input on which the kernel fails."""
    if not actor.may(Scope.PROBLEMS):
        raise HttpError(403, f"an autopsy submits smaller problems: log in with a token of the scope {Scope.PROBLEMS}")
    detail = await gateway.read(reports.show, evaluation_id)
    if (why := _refusal(detail.verdict)) is not None:
        raise InvalidRequest(f"no autopsy: {why}")
    again = detail.request(batch=f"autopsy-{evaluation_id}", priority=actor.priority)
    _autopsies(request).begin(gateway, actor, evaluation_id, Autopsy(again, detail.verdict, width=_WIDTH))
    await gateway.note(actor, "submit", f"autopsy of {evaluation_id}")
    return RedirectResponse(f"/evaluations/{evaluation_id}/autopsy", 303)


@router.get("/evaluations/{name}/autopsy")
async def autopsy(request: Request, viewer: Viewer, gateway: CurrentGateway, name: str) -> Response:
    """Show the autopsy of an evaluation, given by its id or the id's first digits."""
    evaluation_id = await gateway.read(reports.resolve_id, name)
    if str(evaluation_id) != name:
        return RedirectResponse(f"/evaluations/{evaluation_id}/autopsy", 303)
    detail = await gateway.read(reports.show, evaluation_id)
    running = _autopsies(request).find(evaluation_id)
    program = running.report.repro if running and running.report else None
    return page(
        request,
        "autopsy/autopsy.html",
        detail=detail,
        running=running,
        begun=await gateway.read(_begun, evaluation_id),
        refusal=_refusal(detail.verdict),
        may_begin=viewer.may(Scope.PROBLEMS),
        repro=present.source(program) if program else "",
    )


@router.get("/live/evaluations/{evaluation_id}/autopsy")
async def autopsy_live(request: Request, viewer: Viewer, gateway: CurrentGateway, evaluation_id: UUID) -> Response:
    """Send the progress of an autopsy after each change until it ends."""
    await gateway.read(reports.show, evaluation_id)  # refuses an evaluation that the viewer cannot read

    async def render() -> str | None:
        running = _autopsies(request).find(evaluation_id)
        return None if running is None or running.is_over else present.render("autopsy/live.html", running=running)

    return live(request, viewer, render)


@router.get("/evaluations/{evaluation_id}/autopsy/repro.py")
async def repro(request: Request, _: Viewer, gateway: CurrentGateway, evaluation_id: UUID) -> Response:
    """Return the file `repro.py`, which reproduces the failure."""
    await gateway.read(reports.show, evaluation_id)
    running = _autopsies(request).find(evaluation_id)
    if running is None or running.report is None or running.report.repro is None:
        raise HttpError(404, "there is no repro.py: the autopsy still runs, found none, or is no longer stored")
    headers = {"Content-Disposition": 'attachment; filename="repro.py"'}
    return Response(running.report.repro.encode(), media_type="text/plain; charset=utf-8", headers=headers)


def of_evaluation(engine: Engine, viewer: Caller, detail: reports.Detail) -> Markup:
    """Return a link to an evaluation's autopsy, also to one that a client made, or the button that begins one."""
    begun = _begun(engine, detail.evaluation_id)
    may_begin = viewer.may(Scope.PROBLEMS) and _refusal(detail.verdict) is None
    shown = present.render("autopsy/evaluation.html", detail=detail, begun=begun, may_begin=may_begin)
    return Markup(shown)  # noqa: S704 the template escapes


def _begun(engine: Engine, evaluation_id: UUID) -> Sequence[UUID]:
    """Return the evaluations of an evaluation's autopsies."""
    return evaluations.in_batch(engine, f"autopsy-{evaluation_id}")


def _autopsies(request: Request) -> Autopsies:
    """Return the autopsies of this server."""
    state = request.app.state
    state.autopsies = getattr(state, "autopsies", None) or Autopsies()
    return state.autopsies
