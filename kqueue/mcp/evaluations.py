"""Evaluations through the fleet's HTTP API: submissions, waits for verdicts with progress, and repetitions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final
from uuid import UUID

import anyio

from kqueue.contract import Request, Verdict, parse_request
from kqueue.errors import InvalidRequest, KqueueError, ServiceError
from kqueue.mcp.connection import Call, Caller
from kqueue.text import short

#: Seconds for which the fleet holds one request for verdicts, and so the interval between reports to an agent.
_TICK_S: Final = 2.0
#: Maximum characters of the reason why an evaluation waits.
_WHY_CHARS: Final = 300


async def submit(caller: Caller, requests: Sequence[Request]) -> list[UUID]:
    """Submit requests, and return the ids of their evaluations. Raise InvalidRequest if one is refused."""
    results = await caller.submit_each(requests)
    if refusals := [one for one in results if isinstance(one, InvalidRequest)]:
        raise refusals[0]
    return [one.evaluation_id for one in results if not isinstance(one, InvalidRequest)]


async def verdicts(
    call: Call, caller: Caller, ids: Sequence[UUID], timeout_s: float, *, began: float | None = None, what: str = ""
) -> dict[UUID, Verdict]:
    """Wait for verdicts, and return those that came within ``timeout_s`` seconds.

    The call's progress is the number of seconds waited. Its message has the number of verdicts and the reason why the
    first pending evaluation waits. While the fleet cannot be reached the wait continues, and ServiceError is raised if
    it still cannot when the time is over. If the agent cancels its call, the wait ends and the evaluations continue.

    The timeout begins at ``began`` (:func:`time.monotonic`), so that several waits can share it, or now. ``what`` is a
    text before each message of progress.
    """
    began = time.monotonic() if began is None else began
    done: dict[UUID, Verdict] = {}
    first = True
    while True:
        pending = [identity for identity in ids if identity not in done]
        left_s = began + timeout_s - time.monotonic()
        if not pending or (left_s <= 0 and not first):
            return done
        # The first request does not wait, so that existing verdicts and unknown ids are reported at once.
        hold_s = 0.0 if first else min(_TICK_S, left_s)
        first = False
        try:
            done |= {verdict.evaluation_id: verdict for verdict in await caller.verdicts(pending, hold_s)}
            pending = [identity for identity in pending if identity not in done]
        except ServiceError as error:
            left_s = began + timeout_s - time.monotonic()
            if left_s <= 0:
                raise
            await _report(call, began, timeout_s, f"{what}{len(done)} of {len(ids)} done. {short(error, _WHY_CHARS)}")
            await anyio.sleep(min(_TICK_S, left_s))
            continue
        if pending and (call.request_context.meta or {}).get("progress_token") is not None:
            try:
                _, why = await standing(caller, pending[0])
            except KqueueError as error:
                # An unknown reason does not prevent the verdicts.
                why = short(error, _WHY_CHARS)
            await _report(call, began, timeout_s, f"{what}{len(done)} of {len(ids)} done. {why}")


async def standing(caller: Caller, evaluation_id: UUID) -> tuple[str, str]:
    """Return an evaluation's state, and a line with the reason why it waits or the worker that runs it."""
    evaluation = await caller.ask("GET", f"/v1/evaluations/{evaluation_id}")
    line = f"{evaluation_id} is {evaluation['state']}"
    if evaluation["waiting"] is not None:
        line = f"{evaluation_id} waits: {evaluation['waiting']['message']}"
    elif evaluation["state"] == "running" and evaluation["attempts"]:
        attempt = evaluation["attempts"][-1]
        line = f"{evaluation_id} runs on {attempt['worker']}, attempt {attempt['number']}"
    return evaluation["state"], short(line, _WHY_CHARS)


async def judged_once(caller: Caller, evaluation_id: UUID, why: str, priority: str) -> tuple[Request, Verdict]:
    """Return a request that judges an evaluation's kernel again, and the evaluation's verdict.

    The request's batch is ``why`` and the evaluation's id.
    """
    path = f"/v1/evaluations/{evaluation_id}"
    evaluation = await caller.ask("GET", path)
    if evaluation["verdict"] is None:
        raise InvalidRequest(f"{evaluation_id} has no verdict yet: `wait` for it")
    request = parse_request(
        {
            "problem": await caller.read(f"{path}/artifacts/problem.py"),
            "kernel": await caller.read(f"{path}/artifacts/kernel.py"),
            "priority": priority,
            "batch": f"{why}-{evaluation_id}",
        }
        | {name: evaluation[name] for name in ("backend", "lane", "settings", "problem_label", "kernel_label")}
    )
    return request, Verdict.load(evaluation["verdict"])


async def _report(call: Call, began: float, timeout_s: float, message: str) -> None:
    await call.report_progress(round(time.monotonic() - began, 3), timeout_s, message)
