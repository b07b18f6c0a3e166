"""Autopsies by a fleet, and by a local judge."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence

from pydantic_core import PydanticSerializationError

from kqueue.autopsy.coroutine import QUEUE_S
from kqueue.autopsy.report import Ended, Report
from kqueue.autopsy.shrink import Autopsy
from kqueue.client import Client
from kqueue.contract import Request, Result
from kqueue.errors import WaitTimeout
from kqueue.judging import LocalJudge

#: Told after each round.
Told = Callable[[Autopsy], None]


def by_fleet(autopsy: Autopsy, client: Client, budget_s: float, told: Told) -> Report:
    """Have a fleet judge the smaller problems, several beside each other. Nothing is left running.

    Args:
        autopsy: what to look into.
        client: the fleet's.
        budget_s: when to stop, in seconds from now.
        told: called after each round.

    Raises:
        WaitTimeout: nothing was learned in time about a kernel whose failure was not given.
        KqueueError: the fleet refused a request, or cannot be used.
    """
    deadline = time.monotonic() + budget_s

    def judge(requests: Sequence[Request]) -> list[Result | None]:
        left_s = max(QUEUE_S, deadline - time.monotonic())
        # Should this process be killed, what still waits ends by itself.
        tickets = client.submit_batch([request.model_copy(update={"queue_wait_s": left_s}) for request in requests])
        results: dict[int, Result] = {}
        try:
            for ticket, verdict in client.as_completed(tickets, left_s):
                results[tickets.index(ticket)] = verdict
                if autopsy.settled(results, len(tickets)):
                    break
        except WaitTimeout:
            pass
        finally:
            for place, ticket in enumerate(tickets):
                if place not in results:
                    ticket.cancel()
        return [results.get(place) for place in range(len(tickets))]

    return _run(autopsy, judge, deadline, told)


def by_judge(autopsy: Autopsy, local: LocalJudge, budget_s: float, told: Told) -> Report:
    """Have a local judge judge the smaller problems, one after the other.

    Args:
        autopsy: what to look into, of width 1.
        local: the judge. It ends a running evaluation only when it is closed.
        budget_s: when to stop, in seconds from now. What runs then is ended with the judge's process, as by Ctrl-C; in
            a thread other than the main one it is waited for.
        told: called after each round.

    Raises:
        WaitTimeout: nothing was learned in time about a kernel whose failure was not given.
        JudgeUnavailable: this machine cannot judge.
    """
    deadline = time.monotonic() + budget_s

    def judge(requests: Sequence[Request]) -> list[Result | None]:
        results: list[Result | None] = [None] * len(requests)
        with contextlib.suppress(_Over), _ended_at(deadline):
            for place, request in enumerate(requests):
                results[place] = local(request)
        return results

    return _run(autopsy, judge, deadline, told)


class _Over(BaseException):
    """The time is over. It is no error, and nothing on its way may take it for one."""


@contextlib.contextmanager
def _ended_at(deadline: float) -> Generator[None]:
    """Raise :class:`_Over` in the block at a time of the monotonic clock."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(_number: int, _frame: object) -> None:
        raise _Over

    before = signal.signal(signal.SIGALRM, over)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(0.001, deadline - time.monotonic()))
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _run(
    autopsy: Autopsy, judge: Callable[[Sequence[Request]], Sequence[Result | None]], deadline: float, told: Told
) -> Report:
    began = time.monotonic()
    rounds = autopsy.rounds()
    ended = None
    try:
        requests = next(rounds)
        while time.monotonic() < deadline:
            requests = rounds.send(judge(requests))
            told(autopsy)
        ended = Ended.TIME
    except StopIteration:
        pass
    except (KeyboardInterrupt, PydanticSerializationError) as error:
        if autopsy.failure is None:
            # Whatever these requests hold can be written: it was Ctrl-C, which pydantic wraps.
            raise KeyboardInterrupt from error
        ended = Ended.INTERRUPTED
    if autopsy.failure is None:
        raise WaitTimeout("no verdict on the kernel came in time: give it more seconds, or see `kqueue status`")
    return autopsy.report(time.monotonic() - began, ended)
