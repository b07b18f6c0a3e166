"""The kernel of an evaluation that an agent examines."""

from __future__ import annotations

from uuid import UUID

from kqueue.contract import Request, Verdict, parse_request
from kqueue.errors import InvalidRequest
from kqueue.mcp.door import Caller


async def judged_once(caller: Caller, evaluation_id: UUID, why: str, priority: str) -> tuple[Request, Verdict]:
    """Return a request that judges an evaluation's kernel again, and the evaluation's verdict.

    The request's batch is ``why`` and the evaluation's id.

    Raises:
        InvalidRequest: the evaluation has no verdict yet.
        UnknownEvaluation: no evaluation has this id.
        KqueueError: another error of the fleet.
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
