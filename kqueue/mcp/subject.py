"""The kernel of an evaluation that an agent looks into."""

from __future__ import annotations

from uuid import UUID

from kqueue.contract import Request, Verdict, parse_request
from kqueue.errors import InvalidRequest
from kqueue.mcp.door import Caller


async def judged_once(caller: Caller, evaluation_id: UUID, why: str, priority: str) -> tuple[Request, Verdict]:
    """Return what judges an evaluation's kernel again, and its verdict.

    Args:
        caller: who asks.
        evaluation_id: the evaluation.
        why: the new evaluations' batch has this name and the evaluation's id.
        priority: theirs.

    Raises:
        InvalidRequest: the evaluation has no verdict yet.
        UnknownEvaluation: there is no such evaluation.
        KqueueError: what else the fleet answers.
    """
    path = f"/v1/evaluations/{evaluation_id}"
    known = await caller.ask("GET", path)
    if known["verdict"] is None:
        raise InvalidRequest(f"{evaluation_id} has no verdict yet: `wait` for it")
    request = parse_request(
        {
            "problem": await caller.read(f"{path}/artifacts/problem.py"),
            "kernel": await caller.read(f"{path}/artifacts/kernel.py"),
            "priority": priority,
            "batch": f"{why}-{evaluation_id}",
        }
        | {name: known[name] for name in ("backend", "lane", "settings", "problem_label", "kernel_label")}
    )
    return request, Verdict.load(known["verdict"])
