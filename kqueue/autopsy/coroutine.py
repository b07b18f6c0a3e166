"""Autopsies in an event loop, for servers."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from kqueue.autopsy.report import Ended, Report
from kqueue.autopsy.shrink import Autopsy
from kqueue.contract import Request, Result

#: A function that judges the requests of a round until a time of the monotonic clock. A missing result is None. The
#: evaluations expire if the caller no longer waits for them.
Judge = Callable[[Sequence[Request], float], Awaitable[Sequence[Result | None]]]
#: Minimum queue wait of an evaluation in seconds.
QUEUE_S: Final = 1.0


async def dissect(autopsy: Autopsy, judge: Judge, budget_s: float) -> Report:
    """Run rounds until there is nothing smaller to try, or the time is over.

    Args:
        autopsy: the autopsy, with its failure.
        budget_s: time limit in seconds from now.
    """
    began = time.monotonic()
    until = began + budget_s
    rounds = autopsy.rounds()
    ended = None
    try:
        requests = next(rounds)
        while (left_s := until - time.monotonic()) > 0:
            waits = {"queue_wait_s": max(QUEUE_S, left_s)}
            requests = rounds.send(await judge([one.model_copy(update=waits) for one in requests], until))
        ended = Ended.TIME
    except StopIteration:
        pass
    return autopsy.report(time.monotonic() - began, ended)
