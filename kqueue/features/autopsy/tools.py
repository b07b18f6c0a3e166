"""The tool `autopsy`. The smaller problems are judged through the fleet's HTTP API."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Final

import anyio
from mcp_types import CallToolResult
from pydantic import BaseModel, Field

from kqueue.contract import Request, Result
from kqueue.features.autopsy import run
from kqueue.features.autopsy.shrink import Autopsy
from kqueue.mcp.connection import Call, Caller, caller_of
from kqueue.mcp.evaluations import judged_once, submit
from kqueue.mcp.rendering import quoted
from kqueue.mcp.schemas import EvaluationId, PriorityName, result, with_advice

#: Maximum characters of a `repro.py` in an answer.
_MOST_REPRO: Final = 64_000
#: Number of evaluations that are judged concurrently.
_WIDTH: Final = 4
#: Seconds for which the fleet holds one request for verdicts.
_TICK_S: Final = 2.0
#: Maximum seconds for the cancellation of the remaining evaluations.
_END_S: Final = 10.0


class Dissected(BaseModel):
    """The result of an autopsy."""

    category: str
    ended: Annotated[
        str, Field(description="`smallest`, `evaluations`, `time`, `not_again` (not reproduced) or `refused`.")
    ]
    before: Annotated[list[dict[str, Any]] | None, Field(description="Shapes and dtypes of the problem's inputs.")]
    after: Annotated[list[dict[str, Any]] | None, Field(description="The same for the smallest failing problem.")]
    elements_before: int | None
    elements_after: int | None
    fill: Annotated[str | None, Field(description="The values of floating inputs.")]
    evaluations: int
    seconds: float
    report: Annotated[str, Field(description="The same text as in the content.")]


@with_advice
async def autopsy(
    call: Call,
    evaluation_id: EvaluationId,
    budget_s: Annotated[
        float, Field(ge=1, le=600, description="Seconds of the search. The best result by then counts.")
    ] = 40.0,
    priority: PriorityName = "interactive",
    repro: Annotated[
        bool, Field(description=f"Return repro.py too, if it has at most {_MOST_REPRO} characters.")
    ] = False,
) -> Annotated[CallToolResult, Dissected]:
    """Find the smallest shape and the simplest input on which a failed kernel still fails in the same way.

    A few dozen smaller problems are judged. The report has the shapes before and after, the first wrong values, and on
    request `repro.py`: a failing program that needs only torch. It runs the kernel without a sandbox.
    """
    caller = caller_of(call)
    request, failure = await judged_once(caller, evaluation_id, "autopsy", priority)
    made = Autopsy(request, failure, width=_WIDTH)
    report = await run.dissect(made, partial(_judge, call, caller, made, budget_s), budget_s)
    text = quoted("\n".join(report.lines()), "autopsy, with text of the kernel")
    if repro and report.repro is not None:
        if len(report.repro) > _MOST_REPRO:
            text += f"\nrepro.py has {len(report.repro)} characters: `kqueue autopsy {evaluation_id}` writes it."
        else:
            text += f"\n{quoted(report.repro, 'repro.py, with untrusted sources')}"
    record = {name: value for name, value in report.summary().items() if name in Dissected.model_fields}
    return result(text, Dissected.model_validate(record | {"report": text}))


async def _judge(
    call: Call, caller: Caller, autopsy: Autopsy, budget_s: float, requests: Sequence[Request], until: float
) -> list[Result | None]:
    indices = {identity: index for index, identity in enumerate(await submit(caller, requests))}
    results: dict[int, Result] = {}
    try:
        while not autopsy.settled(results, len(requests)) and time.monotonic() < until:
            pending = [identity for identity, index in indices.items() if index not in results]
            hold_s = max(0.0, min(_TICK_S, until - time.monotonic()))
            for verdict in await caller.verdicts(pending, hold_s):
                results[indices[verdict.evaluation_id]] = verdict
            spent = round(budget_s - (until - time.monotonic()), 3)
            await call.report_progress(spent, budget_s, f"{autopsy.progress()}, {autopsy.evaluations} evaluations")
    finally:
        with anyio.move_on_after(_END_S, shield=True):
            for identity, index in indices.items():
                if index not in results:
                    await caller.cancel(identity)
    return [results.get(index) for index in range(len(requests))]
