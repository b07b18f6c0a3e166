"""The tool `duel`: which of two kernels is faster."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Final

import anyio
from mcp_types import CallToolResult
from pydantic import Field

from kqueue.client import wire
from kqueue.contract import parse_request
from kqueue.features.duel.duels import MOST, Duel
from kqueue.mcp.connection import Call, caller_of
from kqueue.mcp.schemas import KernelSource, Language, Submission, Timeout, flat, given, result, with_advice

#: Seconds between two looks at a duel.
_TICK_S: Final = 2.0


@dataclass(frozen=True, kw_only=True)
class Dueling(Submission):
    """The arguments of `duel`."""

    a: KernelSource
    b: KernelSource
    a_backend: Language
    b_backend: Language
    within: Annotated[
        float | None, Field(description="End as equal once the difference is at most this part, such as 0.01.")
    ] = None
    rounds: Annotated[int, Field(description="Maximum number of rounds, each with two evaluations.")] = MOST
    duel: Annotated[
        str | None, Field(description="Id from an earlier answer, to continue that duel with the same arguments.")
    ] = None
    timeout_s: Timeout = 45.0


@with_advice
@flat
async def duel(call: Call, arguments: Dueling) -> Annotated[CallToolResult, Duel]:
    """Find out which of two kernels is faster, by how much, and with what certainty.

    Both are judged again and again in fresh processes until a statistical test decides. A kernel that fails loses. If
    `reason` is null, the duel is undecided: call again with `duel` and the same arguments.
    """
    began, caller = time.monotonic(), caller_of(call)
    if arguments.duel is None:
        first = parse_request(arguments.shared() | {"kernel": arguments.a, "backend": arguments.a_backend})
        body = {"a": wire.dump_request(first), "b": {"kernel": arguments.b, "backend": arguments.b_backend}}
        body |= given(within=arguments.within, rounds=arguments.rounds)
        now = Duel.model_validate(await caller.ask("POST", "/v1/duels", body=body))
    else:
        now = Duel(id=arguments.duel)
    while True:
        now = Duel.model_validate(await caller.ask("GET", f"/v1/duels/{now.id}"))
        passed_s = time.monotonic() - began
        if now.reason is not None or passed_s >= arguments.timeout_s:
            again = "" if now.reason else f"\nIt continues: call `duel` again with duel={now.id}."
            return result(now.message + again, now)
        await call.report_progress(round(passed_s, 3), arguments.timeout_s, now.message)
        await anyio.sleep(min(_TICK_S, arguments.timeout_s - passed_s))
