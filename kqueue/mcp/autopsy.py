"""Autopsies for agents: the fleet's HTTP server has the smaller problems judged."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Final
from uuid import UUID

import anyio

from kqueue.autopsy import coroutine
from kqueue.autopsy.report import Report
from kqueue.autopsy.shrink import Autopsy
from kqueue.client import wire
from kqueue.contract import Request, Result, Verdict
from kqueue.errors import InvalidRequest
from kqueue.mcp.door import Call, Caller
from kqueue.mcp.subject import judged_once

#: Evaluations that are judged beside each other.
_WIDTH: Final = 4
#: How long the fleet holds one question for verdicts, in seconds.
_TICK_S: Final = 2.0
#: How long ending what still runs may take, in seconds.
_END_S: Final = 10.0


async def dissect(call: Call, caller: Caller, evaluation_id: UUID, budget_s: float, priority: str) -> Report:
    """Shrink a failed evaluation within some seconds, and report what was found.

    Progress is the seconds that went by. Nothing goes on if the agent cancels its call.

    Raises:
        InvalidRequest: the evaluation has no verdict yet.
        UnknownEvaluation: there is no such evaluation.
        KqueueError: what else the fleet answers.
    """
    request, failure = await judged_once(caller, evaluation_id, "autopsy", priority)
    autopsy = Autopsy(request, failure, width=_WIDTH)
    return await coroutine.dissect(autopsy, partial(_judge, call, caller, autopsy, budget_s), budget_s)


async def _judge(
    call: Call, caller: Caller, autopsy: Autopsy, budget_s: float, requests: Sequence[Request], until: float
) -> list[Result | None]:
    keyed = [wire.with_key(request) for request in requests]
    answer = await caller.ask(
        "POST", "/v1/evaluations/each", body={"entries": [wire.dump_request(request) for request in keyed]}
    )
    accepted = [wire.load_result(request, one) for request, one in zip(keyed, answer["results"], strict=True)]
    places: dict[UUID, int] = {}
    for place, one in enumerate(accepted):
        if isinstance(one, InvalidRequest):
            raise one
        places[one.evaluation_id] = place
    results: dict[int, Result] = {}
    try:
        while not autopsy.settled(results, len(keyed)) and time.monotonic() < until:
            pending = [str(identity) for identity, place in places.items() if place not in results]
            hold_s = max(0.0, min(_TICK_S, until - time.monotonic()))
            told = await caller.ask("POST", "/v1/evaluations/wait", body={"evaluation_ids": pending, "timeout": hold_s})
            for verdict in map(Verdict.load, told["verdicts"]):
                results[places[verdict.evaluation_id]] = verdict
            spent = round(budget_s - (until - time.monotonic()), 3)
            await call.report_progress(spent, budget_s, f"{autopsy.progress()}; {autopsy.evaluations} evaluations")
    finally:
        with anyio.move_on_after(_END_S, shield=True):
            for identity, place in places.items():
                if place not in results:
                    await caller.ask("POST", f"/v1/evaluations/{identity}/cancel")
    return [results.get(place) for place in range(len(keyed))]
