"""Autopsies in an event loop: whoever serves others has the smaller problems judged."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from kqueue.autopsy.report import Ended, Report
from kqueue.autopsy.shrink import Autopsy
from kqueue.contract import Request, Result

#: Has the requests of one round judged until a time of the monotonic clock; None in the place of what has no result.
#: Should nobody wait for them any more, they end by themselves then.
Judge = Callable[[Sequence[Request], float], Awaitable[Sequence[Result | None]]]
#: The shortest time that a fleet is asked to keep an evaluation for, in seconds.
QUEUE_S: Final = 1.0


async def dissect(autopsy: Autopsy, judge: Judge, budget_s: float) -> Report:
    """Have rounds judged until nothing smaller is found to fail, or the time is over.

    Args:
        autopsy: what to look into, with its failure.
        judge: has a round judged.
        budget_s: when to stop, in seconds from now.
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
