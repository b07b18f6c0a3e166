"""Waiting for verdicts, and saying meanwhile why."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final
from uuid import UUID

import anyio

from kqueue.contract import Verdict
from kqueue.errors import KqueueError, ServiceError, UnknownEvaluation
from kqueue.mcp.door import Call, Caller
from kqueue.mcp.words import short

#: How long the fleet holds one question for verdicts, and so how often an agent hears why it waits, in seconds.
_TICK_S: Final = 2.0
#: The longest line about why an evaluation waits, in characters.
_WHY_CHARS: Final = 300


async def verdicts(
    call: Call, caller: Caller, ids: Sequence[UUID], timeout_s: float, *, began: float | None = None, what: str = ""
) -> dict[UUID, Verdict]:
    """Wait for verdicts, and return those that came within ``timeout_s`` seconds.

    These begin now, or at ``began`` (:func:`time.monotonic`) where a call waits several times; ``what`` says before
    each message for what it waits.

    The call's progress is the seconds waited; its message says how many verdicts there are and why the first of the
    others waits. A fleet that cannot be reached is waited for. If the agent cancels its call the wait ends and the
    evaluations go on.

    Raises:
        UnknownEvaluation: there is no such evaluation.
        ServiceError: the fleet could not be reached in the end.
        KqueueError: what else it answers.
    """
    began = time.monotonic() if began is None else began
    found: dict[UUID, Verdict] = {}
    first = True
    while True:
        pending = [identity for identity in ids if identity not in found]
        left_s = began + timeout_s - time.monotonic()
        if not pending or (left_s <= 0 and not first):
            return found
        # The first question is a look: what is there is told at once, and so is an unknown id.
        hold_s = 0.0 if first else min(_TICK_S, left_s)
        first = False
        body = {"evaluation_ids": [str(identity) for identity in pending], "timeout": hold_s}
        try:
            answer = await caller.ask("POST", "/v1/evaluations/wait", body=body)
            if answer["unknown"]:
                raise UnknownEvaluation(answer["unknown"][0])
            came = [Verdict.load(fields) for fields in answer["verdicts"]]
            found |= {verdict.evaluation_id: verdict for verdict in came}
            pending = [identity for identity in pending if identity not in found]
        except ServiceError as error:
            left_s = began + timeout_s - time.monotonic()
            if left_s <= 0:
                raise
            await _report(call, began, timeout_s, f"{what}{len(found)} of {len(ids)} done. {short(error, _WHY_CHARS)}")
            await anyio.sleep(min(_TICK_S, left_s))
            continue
        if pending and _is_heard(call):
            try:
                _, why = await standing(caller, pending[0])
            except KqueueError as error:
                # The verdicts come all the same.
                why = short(error, _WHY_CHARS)
            await _report(call, began, timeout_s, f"{what}{len(found)} of {len(ids)} done. {why}")


async def standing(caller: Caller, evaluation_id: UUID) -> tuple[str, str]:
    """Return an evaluation's state, and in one line why it waits and its place, or who runs it."""
    told = await caller.ask("GET", f"/v1/evaluations/{evaluation_id}")
    line = f"{evaluation_id} is {told['state']}"
    if told["waiting"] is not None:
        line = f"{evaluation_id} waits: {told['waiting']['message']}"
    elif told["state"] == "running" and told["attempts"]:
        attempt = told["attempts"][-1]
        line = f"{evaluation_id} runs on {attempt['worker']}, attempt {attempt['number']}"
    return told["state"], short(line, _WHY_CHARS)


def _is_heard(call: Call) -> bool:
    """Return True if the agent's host asked for progress. To look up a reason costs the fleet a query."""
    return (call.request_context.meta or {}).get("progress_token") is not None


async def _report(call: Call, began: float, timeout_s: float, message: str) -> None:
    await call.report_progress(round(time.monotonic() - began, 3), timeout_s, message)
