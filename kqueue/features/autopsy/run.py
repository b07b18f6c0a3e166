"""Autopsies that a fleet, a local judge or a server's event loop runs."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import TYPE_CHECKING, Final

from pydantic_core import PydanticSerializationError

from kqueue.contract import Request, Result
from kqueue.errors import WaitTimeout
from kqueue.features.autopsy.report import Ended, Report
from kqueue.features.autopsy.shrink import Autopsy

if TYPE_CHECKING:
    from kqueue.client import Client
    from kqueue.judging import LocalJudge

#: A function that judges the requests of a round until a time of the monotonic clock. A missing result is None. The
#: evaluations expire if the caller no longer waits for them.
Judge = Callable[[Sequence[Request], float], Awaitable[Sequence[Result | None]]]
#: A function that is called after each round.
OnRound = Callable[[Autopsy], None]
#: Minimum queue wait of an evaluation in seconds.
QUEUE_S: Final = 1.0


async def dissect(autopsy: Autopsy, judge: Judge, budget_s: float) -> Report:
    """Run rounds in an event loop until there is nothing smaller to try, or ``budget_s`` seconds are over."""
    began = time.monotonic()
    until = began + budget_s
    rounds = autopsy.rounds()
    ended = None
    with contextlib.suppress(StopIteration):
        requests = next(rounds)
        while (left_s := until - time.monotonic()) > 0:
            waits = {"queue_wait_s": max(QUEUE_S, left_s)}
            requests = rounds.send(await judge([one.model_copy(update=waits) for one in requests], until))
        ended = Ended.TIME
    return autopsy.report(time.monotonic() - began, ended)


def by_fleet(autopsy: Autopsy, client: Client, budget_s: float, on_round: OnRound) -> Report:
    """Run an autopsy on a fleet, with several problems judged concurrently. No evaluation continues after it.

    Raise WaitTimeout if the failure was not given and no verdict came in ``budget_s`` seconds.
    """
    deadline = time.monotonic() + budget_s

    def judge(requests: Sequence[Request]) -> list[Result | None]:
        left_s = max(QUEUE_S, deadline - time.monotonic())
        # If this process is killed, the waiting evaluations expire.
        tickets = client.submit_batch([request.model_copy(update={"queue_wait_s": left_s}) for request in requests])
        results: dict[int, Result] = {}
        try:
            with contextlib.suppress(WaitTimeout):
                for ticket, verdict in client.as_completed(tickets, left_s):
                    results[tickets.index(ticket)] = verdict
                    if autopsy.settled(results, len(tickets)):
                        break
        finally:
            for index, ticket in enumerate(tickets):
                if index not in results:
                    ticket.cancel()
        return [results.get(index) for index in range(len(tickets))]

    return _run(autopsy, judge, deadline, on_round)


def by_judge(autopsy: Autopsy, local: LocalJudge, budget_s: float, on_round: OnRound) -> Report:
    """Run an autopsy of width 1 with a local judge, which can end a running evaluation only by being closed.

    After ``budget_s`` seconds, the running evaluation is ended together with the judge's process, as by Ctrl-C, in the
    main thread. In another thread it runs to its end. WaitTimeout is raised as by :func:`by_fleet`.
    """
    deadline = time.monotonic() + budget_s

    def judge(requests: Sequence[Request]) -> list[Result | None]:
        results: list[Result | None] = [None] * len(requests)
        with contextlib.suppress(_TimeOver), _ended_at(deadline):
            for index, request in enumerate(requests):
                results[index] = local(request)
        return results

    return _run(autopsy, judge, deadline, on_round)


class _TimeOver(BaseException):
    """Signals that the time is over. It is not an Exception, so that no handler on its way catches it."""


@contextlib.contextmanager
def _ended_at(deadline: float) -> Generator[None]:
    """Raise :class:`_TimeOver` in the block at a time of the monotonic clock."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(_number: int, _frame: object) -> None:
        raise _TimeOver

    before = signal.signal(signal.SIGALRM, over)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(0.001, deadline - time.monotonic()))
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _run(
    autopsy: Autopsy, judge: Callable[[Sequence[Request]], Sequence[Result | None]], deadline: float, on_round: OnRound
) -> Report:
    began = time.monotonic()
    rounds = autopsy.rounds()
    ended = None
    try:
        requests = next(rounds)
        while time.monotonic() < deadline:
            requests = rounds.send(judge(requests))
            on_round(autopsy)
        ended = Ended.TIME
    except StopIteration:
        pass
    except (KeyboardInterrupt, PydanticSerializationError) as error:
        if autopsy.failure is None:
            # These requests can always be serialized, so the cause was Ctrl-C, which pydantic wraps.
            raise KeyboardInterrupt from error
        ended = Ended.INTERRUPTED
    if autopsy.failure is None:
        raise WaitTimeout("no verdict on the kernel came in time: give it more seconds, or see `kqueue status`")
    return autopsy.report(time.monotonic() - began, ended)
