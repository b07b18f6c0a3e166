"""The tools. Agents read their docstrings and the descriptions of their fields."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final
from uuid import UUID

from mcp.server.mcpserver.tools import Tool
from mcp_types import CallToolResult, ToolAnnotations
from pydantic import BaseModel, Field

from kqueue import examinations, registry
from kqueue.categories import CATEGORIES, Category
from kqueue.client.transport import check_each
from kqueue.contract import Precision, Request, Sanitizer, Verdict, parse_request
from kqueue.errors import InvalidRequest
from kqueue.evidence import NEEDS, Facts
from kqueue.figures import brief
from kqueue.mcp import evaluations, files, rendering
from kqueue.mcp.connection import Call, Caller, caller_of
from kqueue.mcp.schemas import (
    MOST,
    EvaluationId,
    Fresh,
    Judged,
    KernelSource,
    Label,
    Language,
    PriorityName,
    ProblemName,
    Reported,
    RowLimit,
    Rows,
    Submission,
    Submissions,
    Submitted,
    Timeout,
    Waited,
    flat,
    given,
    result,
    with_advice,
)
from kqueue.text import short


@dataclass(frozen=True, kw_only=True)
class OneKernel(Submission):
    """The arguments of `judge`."""

    kernel: KernelSource
    backend: Language
    kernel_label: Label = None
    priority: PriorityName = "interactive"
    fresh: Fresh = False
    timeout_s: Timeout = 45.0


class Variant(BaseModel, extra="forbid"):
    """One kernel of several."""

    kernel: KernelSource
    backend: Language
    label: Label = None


@dataclass(frozen=True, kw_only=True)
class SeveralKernels(Submission):
    """The arguments of `submit`."""

    kernels: Annotated[list[Variant], Field(min_length=1, max_length=MOST, description=f"At most {MOST}.")]
    batch: Annotated[str | None, Field(description="A name for all of them, which users see.")] = None
    priority: PriorityName = "batch"
    fresh: Fresh = False


@with_advice
@flat
async def judge(call: Call, arguments: OneKernel) -> Annotated[CallToolResult, Reported]:
    """Judge one kernel against a problem, and wait for its verdict.

    The kernel is checked on several input sets, including hidden ones, and timed against the reference. The report of a
    failure has its location and details (first wrong values, source lines, compiler messages). The report of a right
    kernel has its time and its bottleneck. A kernel that fails is not an error of this tool.
    """
    caller = caller_of(call)
    own = {name: getattr(arguments, name) for name in ("kernel", "backend", "kernel_label", "priority")}
    request = parse_request(arguments.shared() | given(**own, batch=caller.batch, reuse=not arguments.fresh))
    [accepted] = await caller.submit([request])
    return await _report(call, caller, accepted.evaluation_id, arguments.timeout_s, request.kernel)


@with_advice
@flat
async def submit(call: Call, arguments: SeveralKernels) -> Annotated[CallToolResult, Submissions]:
    """Submit several kernels for one problem, and return their ids without waiting.

    A refused kernel does not affect the rest. Call `wait` with the ids.
    """
    caller = caller_of(call)
    shared = arguments.shared() | given(
        batch=arguments.batch or caller.batch, priority=arguments.priority, reuse=not arguments.fresh
    )
    entries = check_each(
        shared | given(kernel=one.kernel, backend=one.backend, kernel_label=one.label) for one in arguments.kernels
    )
    submitted = [
        Submitted(evaluation_id=None, error=short(outcome, 300))
        if isinstance(outcome, InvalidRequest)
        else Submitted(evaluation_id=str(outcome.evaluation_id), error=None)
        for outcome in await caller.submit_each(entries)
    ]
    lines = (f"{index}: {one.evaluation_id or f'REFUSED: {one.error}'}" for index, one in enumerate(submitted))
    return result("\n".join(lines), Submissions(submitted=submitted))


@with_advice
async def wait(
    call: Call,
    evaluation_ids: Annotated[list[UUID], Field(min_length=1, max_length=MOST, description=f"At most {MOST}.")],
    timeout_s: Timeout = 45.0,
) -> Annotated[CallToolResult, Waited]:
    """Wait until evaluations have their verdicts, and list them in one line each.

    It returns when all are done, or after `timeout_s` with the verdicts so far. `verdict` returns the report of one.
    """
    caller = caller_of(call)
    ids = list(dict.fromkeys(evaluation_ids))
    done = await evaluations.verdicts(call, caller, ids, timeout_s)
    late = [identity for identity in ids if identity not in done]
    why = (await evaluations.standing(caller, late[0]))[1] if late else ""
    listed, lines = list[Judged](), list[str]()
    for identity in ids:
        if verdict := done.get(identity):
            listed.append(Judged.of(verdict))
            label = f" ({short(verdict.kernel_label)})" if verdict.kernel_label else ""
            lines.append(f"{identity}{label}: {rendering.headline(verdict)}: {brief(verdict.message)}")
        else:
            listed.append(Judged(evaluation_id=str(identity), state="open"))
            lines.append(f"no verdict yet: {why if identity == late[0] else identity}")
    more = " The rest continue: call `wait` again with their ids." if late else ""
    return result(
        f"{len(done)} of {len(ids)} done.{more}\n"
        + rendering.quoted("\n".join(lines), "evaluations, with untrusted labels and messages"),
        Waited(done=len(done), evaluations=listed),
    )


@with_advice
async def verdict(call: Call, evaluation_id: EvaluationId) -> Annotated[CallToolResult, Reported]:
    """Report on one evaluation: its verdict in the form of `judge`, or the reason why it has none yet."""
    return await _report(call, caller_of(call), evaluation_id, 0.0, None)


@with_advice
async def sanitize(
    call: Call,
    evaluation_id: EvaluationId,
    tools: Annotated[
        list[Sanitizer] | None, Field(description="By default all four. Each takes several seconds.", max_length=4)
    ] = None,
    whole: Annotated[
        bool, Field(description="Use the problem's own sizes. By default they are halved to at most 128.")
    ] = False,
    priority: PriorityName = "interactive",
    timeout_s: Timeout = 120.0,
) -> Annotated[CallToolResult, Reported]:
    """Run an evaluation's kernel under compute-sanitizer: out-of-bounds access, races, unwritten memory, barriers.

    The report has the kernel, line, thread, address and allocation. If the kernel gets another verdict with small
    sizes, it runs with the problem's own sizes.
    """
    caller = caller_of(call)
    request, earlier = await evaluations.judged_once(caller, evaluation_id, "sanitize", priority)
    requests = examinations.sanitizing(request, tools or list(Sanitizer), whole=whole)
    return await _examined(call, caller, requests, earlier.category, timeout_s)


@with_advice
async def profile(
    call: Call, evaluation_id: EvaluationId, priority: PriorityName = "interactive", timeout_s: Timeout = 120.0
) -> Annotated[CallToolResult, Reported]:
    """Profile each kernel of one call with Nsight Compute: memory traffic, operations, occupancy, stalls.

    Use it on a right kernel that should be faster.
    """
    caller = caller_of(call)
    request, earlier = await evaluations.judged_once(caller, evaluation_id, "profile", priority)
    if examinations.is_profiled(earlier.evidence):
        return await _report(call, caller, evaluation_id, 0.0, request.kernel)
    # The problem's name suffices for a token that can only name stored problems.
    stored = request.model_copy(update={"problem": request.problem_name})
    return await _examined(call, caller, examinations.profiling(stored), earlier.category, timeout_s)


@with_advice
async def cancel(call: Call, evaluation_id: EvaluationId) -> str:
    """Cancel an evaluation, and stop it if it runs. An evaluation with a verdict keeps the verdict."""
    cancelled = await caller_of(call).cancel(evaluation_id)
    return "It is cancelled." if cancelled else "It already had its verdict, and keeps it."


async def explain(
    category: Annotated[Category | None, Field(description="By default all, one line each.")] = None,
) -> str:
    """Explain a category of verdicts: its meaning, who is to blame, advice, and the facts in such verdicts."""
    if category is None:
        return "\n".join(f"{row.category} (to blame: {row.blame}): {row.meaning}" for row in CATEGORIES.values())
    needs = NEEDS[category]
    facts = "".join(f"\n- {one}: {Facts.model_fields[one].description or ''}" for one in (*needs.facts, *needs.one_of))
    return f"{category}: {category.info.meaning}\nTo blame: {category.blame}. {rendering.next_step(category.blame)}" + (
        f"\nFacts in its verdict.json:{facts}" if facts else ""
    )


@with_advice
async def problems(
    call: Call,
    problem: ProblemName = None,
    limit: RowLimit = 20,
    cursor: Annotated[str | None, Field(description="Cursor from an earlier answer, for the next page.")] = None,
) -> Annotated[CallToolResult, Rows]:
    """List the stored problems, the latest first, after those that other owners share.

    `judge` accepts their names. `read` kqueue://problems/HASH returns a source.
    """
    caller = caller_of(call)
    answer = await caller.ask("GET", "/v1/problems", query=given(problem=problem, limit=limit, cursor=cursor))
    common = [] if problem or cursor else (await caller.ask("GET", "/v1/shared"))["problems"]
    stored = {one["problem_hash"] for one in answer["problems"]}
    rows = [
        {
            "problem": f"sha256:{row['problem_hash']}",
            "problem_label": short(row["problem_label"] or ""),
            "bytes": row["bytes"],
            "created_at": row["created_at"],
            "shared_by": row.get("owner"),
        }
        for row in (
            *({**one, "problem_label": one["label"], "bytes": len(one["source"].encode())} for one in common),
            *answer["problems"],
        )
        if "source" not in row or row["problem_hash"] not in stored
    ]
    more = "" if answer["cursor"] is None else f"\nThere are more: call again with cursor {answer['cursor']}"
    lines = (f"{row['problem']} {row['bytes']} bytes, {row['problem_label']}" for row in rows)
    return _table(lines, "stored problems, with untrusted labels", more, Rows(rows=rows, cursor=answer["cursor"]))


@with_advice
async def leaderboard(
    call: Call,
    problem: ProblemName = None,
    precision: Precision | None = None,
    device: Annotated[str | None, Field(description="A device model's name, or a part of it.")] = None,
    limit: RowLimit = 20,
) -> Annotated[CallToolResult, Rows]:
    """List the fastest right kernel of each problem, precision and device model, the largest speedup first.

    `read` kqueue://evaluations/ID/kernel.py returns a kernel's source.
    """
    query = given(problem=problem, precision=precision, device=device, limit=limit)
    answer = await caller_of(call).ask("GET", "/v1/leaderboard", query=query)
    names = ("precision", "backend", "runtime_ms", "baseline_ms", "speedup", "evaluation_id")
    rows = [
        {
            "problem": f"sha256:{row['problem_hash']}",
            **{name: short(row[name] or "") for name in ("problem_label", "kernel_label", "device")},
            **{name: row[name] for name in names},
        }
        for row in answer["best"]
    ]
    lines = (
        f"{row['evaluation_id']} {row['runtime_ms']:.4g} ms"
        + ("" if row["speedup"] is None else f", {row['speedup']:.3g}x")
        + f", {row['backend']}, {row['precision']} on {row['device']}, {row['problem']} {row['problem_label']}: "
        + row["kernel_label"]
        for row in rows
    )
    return _table(lines, "the fastest kernels, with untrusted labels", "", Rows(rows=rows))


@with_advice
async def read(
    call: Call,
    uri: Annotated[
        str,
        Field(
            description="kqueue://evaluations/ID/NAME (kernel.py, problem.py, log, verdict.json or evidence.json), "
            "kqueue://problems/HASH, or kqueue://settings."
        ),
    ],
    offset: files.Offset = 0,
) -> str:
    """Read a source, a log or evidence, like this server's resources. Long texts come in pages."""
    return await files.page(caller_of(call), uri, offset)


_LOOKS: Final = ToolAnnotations(read_only_hint=True, open_world_hint=False)
_SUBMITS: Final = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=False)
_ENDS: Final = ToolAnnotations(read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=False)
_TOOLS: Final[Mapping[Callable[..., Any], ToolAnnotations]] = {
    judge: _SUBMITS, submit: _SUBMITS, wait: _LOOKS, verdict: _LOOKS, sanitize: _SUBMITS, profile: _SUBMITS,
    cancel: _ENDS, explain: _LOOKS, problems: _LOOKS, leaderboard: _LOOKS, read: _LOOKS,
}  # fmt: skip


def every() -> list[Tool]:
    """Return the tools, which refuse unknown arguments. The SDK would ignore these."""
    hinted = {**_TOOLS, **dict.fromkeys(registry.attached("tool"), _SUBMITS)}
    made = [Tool.from_function(tool, annotations=hints) for tool, hints in hinted.items()]
    for tool in made:
        model = tool.fn_metadata.arg_model
        model.model_config["extra"] = "forbid"
        model.model_rebuild(force=True)
        tool.parameters = model.model_json_schema()
    return made


async def _report(
    call: Call, caller: Caller, evaluation_id: UUID, timeout_s: float, kernel: str | None
) -> CallToolResult:
    """Wait for an evaluation and return its report. ``kernel`` is its source, if known."""
    verdict: Verdict | None = (await evaluations.verdicts(call, caller, [evaluation_id], timeout_s)).get(evaluation_id)
    if verdict is None:
        state, why = await evaluations.standing(caller, evaluation_id)
        text = (
            f"No verdict yet. The evaluation is {state}.\n{rendering.quoted(why, 'why it waits')}\n"
            f"It continues: call `wait` with {evaluation_id}, or `cancel` it."
        )
        return result(text, Reported(evaluation_id=str(evaluation_id), state=state, report=text))
    if kernel is None:
        kernel = await caller.read(f"/v1/evaluations/{evaluation_id}/artifacts/kernel.py")
    text = rendering.feedback(verdict, kernel)
    return result(text, Reported.of(verdict, report=text))


async def _examined(
    call: Call, caller: Caller, requests: Iterable[Request], known: Category, timeout_s: float
) -> CallToolResult:
    """Submit requests one after another until one has the known category, and return the report on the last one."""
    until, identity, kernel = time.monotonic() + timeout_s, UUID(int=0), ""
    for request in requests:
        [identity] = await evaluations.submit(caller, [request])
        left_s, kernel = max(0.0, until - time.monotonic()), request.kernel
        verdict = (await evaluations.verdicts(call, caller, [identity], left_s)).get(identity)
        if verdict is None or (verdict.judged and verdict.category is known):
            break
    return await _report(call, caller, identity, 0.0, kernel)


def _table(lines: Iterable[str], what: str, more: str, rows: Rows) -> CallToolResult:
    text = "\n".join(lines)
    return result((rendering.quoted(text, what) if text else "There are none.") + more, rows)
