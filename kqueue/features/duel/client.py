"""Duels from Python: on this machine, and the methods of clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kqueue.client.transport import Entry, check
from kqueue.contract import Precision, Request, Settings, Verdict
from kqueue.errors import KqueueError
from kqueue.features.duel.duels import MOST, Duel, Match
from kqueue.features.duel.duels import duel as fight

if TYPE_CHECKING:
    from kqueue.client import Client


def duel(
    *,
    problem: str,
    a: str,
    b: str,
    backend: str | None = None,
    precision: Precision | str | None = None,
    settings: Settings | Mapping[str, Any] | None = None,
    device: str | None = None,
    within: float | None = None,
    rounds: int = MOST,
) -> Duel:
    """Find out on this machine which of two kernels is faster.

    Args:
        a, b: sources of the kernels.
        within: end as ``equal`` once the interval of the ratio lies within this part of 1, such as 0.01.
        rounds: maximum number of rounds.
        problem, backend, precision, settings, device: see :func:`judge`, whose errors are possible.
    """
    from kqueue.judging import LocalJudge, request_of

    same: dict[str, Any] = {"problem": problem, "backend": backend, "precision": precision, "settings": settings}
    match = Match.of(*(request_of(kernel=kernel, **same) for kernel in (a, b)), within=within, most=rounds)
    with LocalJudge(device) as local:
        *_, end = fight(local.map, match)
    return end


def _duel(
    self: Client,
    a: Entry,
    b: Entry,
    *,
    within: float | None = None,
    rounds: int = MOST,
    allow_idle_lane: bool = False,
    report: Callable[[Duel], object] | None = None,
) -> Duel:
    """Find out which of two kernels is faster. If interrupted, cancel the evaluations.

    Args:
        a, b: requests that differ only in kernel, backend and kernel_label.
        within: end as ``equal`` once the interval of the ratio lies within this part of 1, such as 0.01.
        rounds: maximum number of rounds.
        allow_idle_lane: see :meth:`submit`, whose errors are possible.
        report: function to call with the state after each verdict.
    """

    def judge(requests: list[Request]) -> Iterator[Verdict]:
        pending = self.submit_batch(requests, allow_idle_lane=allow_idle_lane)
        try:
            while pending:
                yield pending[0].wait()
                del pending[0]
        finally:
            with suppress(KqueueError):
                for ticket in pending:
                    ticket.cancel()

    match = Match.of(check(a), check(b), within=within, most=rounds)
    now = match.state([])
    for now in fight(judge, match):
        if report is not None:
            report(now)
    return now


async def _duel_async(
    self: Any, a: Entry, b: Entry, *, within: float | None = None, rounds: int = MOST, allow_idle_lane: bool = False
) -> Duel:
    """Find out which of two kernels is faster. :meth:`Client.duel` documents the arguments."""
    match = Match.of(check(a), check(b), within=within, most=rounds)
    verdicts: list[Verdict] = []
    while (now := match.state(verdicts)).reason is None:
        requests = match.requests(len(verdicts) // 2, now.due)
        verdicts += await self.wait_all(await self.submit_batch(requests, allow_idle_lane=allow_idle_lane))
    return now


class Duels:
    """The method of :class:`~kqueue.Client`."""

    duel = _duel


class AsyncDuels:
    """The method of :class:`~kqueue.AsyncClient`."""

    duel = _duel_async
