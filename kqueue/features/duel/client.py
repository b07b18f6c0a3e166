"""Duels from Python: on this machine, and the methods of clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kqueue.client.transport import Entry, check
from kqueue.contract import Precision, Settings, Verdict
from kqueue.errors import KqueueError
from kqueue.features.duel.duels import MOST, Duel, Match
from kqueue.features.duel.duels import duel as fight

if TYPE_CHECKING:
    from kqueue.client.interfaces import Methods


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


async def _duel(
    self: Methods[Any],
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
    match = Match.of(check(a), check(b), within=within, most=rounds)
    results: list[Verdict | None] = []
    now = match.state(results)
    while now.reason is None:
        requests = match.requests(len(results) // 2, now.due)
        if results:  # the fleet has stored their trees
            requests = [request.model_copy(update={"trees": ()}) for request in requests]
        pending = await self.submit_batch(requests, allow_idle_lane=allow_idle_lane)
        results += [None] * len(requests)
        try:
            while pending and now.reason is None:
                [results[-len(pending)]] = await self.wait_all(pending[:1])
                del pending[0]
                now = match.state(results)
                if report is not None:
                    report(now)
        finally:
            with suppress(KqueueError):
                for ticket in pending:
                    await self.cancel(ticket.evaluation_id)
    return now


class Duels:
    """The method of clients."""

    duel = _duel
