"""Autopsies in an event loop: whoever serves others has the smaller problems judged."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence

from kqueue.autopsy.report import Ended, Report
from kqueue.autopsy.shrink import Autopsy
from kqueue.contract import Request, Result

#: Has the requests of one round judged until a time of the monotonic clock; None in the place of what has no result.
Judge = Callable[[Sequence[Request], float], Awaitable[Sequence[Result | None]]]


async def dissect(autopsy: Autopsy, judge: Judge, budget_s: float) -> Report:
    """Have rounds judged until nothing smaller is found to fail, or the time is over.

    Args:
        autopsy: what to look into, with its failure.
        judge: has a round judged.
        budget_s: when to stop, in seconds from now.
    """
    began = time.monotonic()
    rounds = autopsy.rounds()
    ended = None
    try:
        requests = next(rounds)
        while time.monotonic() - began < budget_s:
            requests = rounds.send(await judge(requests, began + budget_s))
        ended = Ended.TIME
    except StopIteration:
        pass
    return autopsy.report(time.monotonic() - began, ended)
