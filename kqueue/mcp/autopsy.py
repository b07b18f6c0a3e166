"""Autopsies for agents. The smaller problems are judged through the fleet's HTTP API."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Final
from uuid import UUID

import anyio

from kqueue.autopsy import run
from kqueue.autopsy.report import Report
from kqueue.autopsy.shrink import Autopsy
from kqueue.contract import Request, Result, Verdict
from kqueue.mcp.connection import Call, Caller
from kqueue.mcp.evaluations import judged_once, submit

#: Number of evaluations that are judged concurrently.
_WIDTH: Final = 4
#: Seconds for which the fleet holds one request for verdicts.
_TICK_S: Final = 2.0
#: Maximum seconds for the cancellation of the remaining evaluations.
_END_S: Final = 10.0


async def dissect(call: Call, caller: Caller, evaluation_id: UUID, budget_s: float, priority: str) -> Report:
    """Shrink a failed evaluation for at most ``budget_s`` seconds, and return the report.

    Progress is the number of seconds that passed. If the agent cancels its call, all evaluations are cancelled.
    """
    request, failure = await judged_once(caller, evaluation_id, "autopsy", priority)
    autopsy = Autopsy(request, failure, width=_WIDTH)
    return await run.dissect(autopsy, partial(_judge, call, caller, autopsy, budget_s), budget_s)


async def _judge(
    call: Call, caller: Caller, autopsy: Autopsy, budget_s: float, requests: Sequence[Request], until: float
) -> list[Result | None]:
    indices = {identity: index for index, identity in enumerate(await submit(caller, requests))}
    results: dict[int, Result] = {}
    try:
        while not autopsy.settled(results, len(requests)) and time.monotonic() < until:
            pending = [str(identity) for identity, index in indices.items() if index not in results]
            hold_s = max(0.0, min(_TICK_S, until - time.monotonic()))
            body = {"evaluation_ids": pending, "timeout": hold_s}
            answer = await caller.ask("POST", "/v1/evaluations/wait", body=body)
            for verdict in map(Verdict.load, answer["verdicts"]):
                results[indices[verdict.evaluation_id]] = verdict
            spent = round(budget_s - (until - time.monotonic()), 3)
            await call.report_progress(spent, budget_s, f"{autopsy.progress()}, {autopsy.evaluations} evaluations")
    finally:
        with anyio.move_on_after(_END_S, shield=True):
            for identity, index in indices.items():
                if index not in results:
                    await caller.ask("POST", f"/v1/evaluations/{identity}/cancel")
    return [results.get(index) for index in range(len(requests))]
