"""The page with the fleet's current state: lanes, GPUs, workers and the last hour."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any, Final

from fastapi import Request, Response
from sqlalchemy import Engine
from starlette.routing import Match
from starlette.types import Scope

from kqueue.categories import Blame, Category
from kqueue.errors import KqueueError, UnknownEvaluation
from kqueue.http.devices import Device, Fleet, View
from kqueue.http.gateway import Gateway
from kqueue.http.shapes import lanes_of
from kqueue.states import EvaluationState, Trials
from kqueue.store import engine as store
from kqueue.store import reports, tokens
from kqueue.store.reports import Crowd, Listed, Oldest, Waiting
from kqueue.web import present
from kqueue.web.live import live
from kqueue.web.route import PageRoute, Viewer, page, pages

#: Seconds for which all viewers share one reading of the fleet, or its error.
_FRESH_S: Final = 2.0
_MINUTES: Final = 60
#: Maximum number of producers and of lanes on the page.
_MOST: Final = 50
#: Number of verdicts on the page.
_LATEST: Final = 10


class _ForPeople(PageRoute):
    """A route whose path the API has too. It matches only if a browser requests a page."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        headers = dict(scope.get("headers", ()))
        if b"authorization" in headers or b"text/html" not in headers.get(b"accept", b""):
            return Match.NONE, {}
        return super().matches(scope)


router: Final = pages()
_root: Final = pages()
_root.route_class = _ForPeople


@dataclass(frozen=True, slots=True)
class Glance:
    """The data of this page that is not part of the fleet's view."""

    crowds: Sequence[Crowd]
    oldest: dict[str, Oldest]
    waiting: dict[str, Waiting | None]
    uses: dict[tuple[str, str], float]
    minutes: Sequence[int]
    categories: dict[Category, int]
    running: dict[Any, Listed]
    latest: Sequence[Listed]
    tokens: dict[str, str]
    """Names of tokens by the producer of their evaluations."""

    @property
    def blames(self) -> dict[Blame, int]:
        """Numbers of evaluations that ended in the last hour, by blame."""
        counted = dict.fromkeys(Blame, 0)
        for category, number in self.categories.items():
            counted[category.blame] += number
        return {blame: number for blame, number in counted.items() if number}


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU with its running evaluations, their steps, and the share of the last hour in which it was busy."""

    device: Device
    running: Sequence[tuple[Listed, str | None]]
    share: float | None


@_root.get("/")
async def now(request: Request, _: Viewer) -> Response:
    """Show the fleet."""
    return page(request, "now.html", **await _fields(request))


router.include_router(_root)


@router.get("/live/now")
async def now_live(request: Request, viewer: Viewer) -> Response:
    """Send the fleet's state after each change."""

    async def render() -> str:
        return present.render("now_live.html", **await _fields(request))

    return live(request, viewer, render)


async def _fields(request: Request) -> dict[str, Any]:
    fleet: Fleet = request.app.state.fleet
    glances: Glances = request.app.state.glances
    view, glance = await fleet.seen(), await glances.get(request.app.state.gateway)
    return {
        "lanes": dict(islice(lanes_of(view).items(), _MOST)),
        "cards": _cards(view, glance),
        "workers": [(worker, glance.running.get(worker.busy_with)) for worker in view.workers],
        "records": view.records,
        "glance": glance,
        "total": sum(glance.categories.values()),
        "most": max(*glance.minutes, 1),
    }


class Glances:
    """The latest readings of the fleet, which all callers with the same view of the database share."""

    def __init__(self) -> None:
        self._by_viewer: dict[store.Viewer, _Reading] = {}

    async def get(self, gateway: Gateway) -> Glance:
        """Return a reading that is at most two seconds old, or raise DatabaseUnavailable."""
        reading = self._by_viewer.pop(store.viewer(), None) or _Reading()
        self._by_viewer[store.viewer()] = reading
        if len(self._by_viewer) > _MOST:
            del self._by_viewer[next(iter(self._by_viewer))]
        return await reading.get(gateway)


class _Reading:
    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._read_at = float("-inf")
        self._last: Glance | KqueueError | None = None

    async def get(self, gateway: Gateway) -> Glance:
        async with self._turn:
            if self._last is None or time.monotonic() - self._read_at > _FRESH_S:
                try:
                    self._last = await gateway.read(_read, within_s=gateway.config.live_s)
                except KqueueError as error:
                    # Without the stored error, each waiting viewer would wait for the database again.
                    self._last = error
                self._read_at = time.monotonic()
            if isinstance(self._last, KqueueError):
                raise self._last.with_traceback(None)
            return self._last


def _read(engine: Engine, *, within_s: float) -> Glance:
    oldest = reports.oldest(engine)[:_MOST]
    running = reports.listing(engine, state=EvaluationState.RUNNING, trials=Trials.WITH, limit=1000)
    return Glance(
        crowds=reports.crowds(engine)[:_MOST],
        oldest={one.lane: one for one in oldest},
        waiting={one.lane: _waiting(engine, one, within_s) for one in oldest},
        uses={(one.host, one.device): one.share for one in reports.use(engine)},
        minutes=reports.ended_by_minute(engine, minutes=_MINUTES),
        categories=reports.outcomes(engine, since=datetime.now(UTC) - timedelta(hours=1)),
        running={listed.evaluation_id: listed for listed in running},
        latest=reports.results(engine, limit=_LATEST),
        tokens={f"token:{token.id}": token.name for token in tokens.listing(engine)},
    )


def _waiting(engine: Engine, oldest: Oldest, within_s: float) -> Waiting | None:
    try:
        return reports.waiting(engine, oldest.evaluation_id, within_s=within_s)
    except UnknownEvaluation:  # retention removed it in the meantime
        return None


def _cards(view: View, glance: Glance) -> list[Card]:
    steps = {worker.busy_with: worker.step for worker in view.workers}
    cards: list[Card] = []
    for device in view.devices:
        ids = [identity for identity in device.gpu.running if identity in glance.running]
        running = [(glance.running[identity], steps.get(identity)) for identity in ids]
        cards.append(Card(device, running, glance.uses.get((device.gpu.host, device.gpu.uuid))))
    return cards
