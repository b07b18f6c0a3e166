"""The tools. Agents read their docstrings and the descriptions of their fields."""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, ParamSpec, TypeVar, TypeVarTuple
from uuid import UUID

import anyio
import anyio.to_thread
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import CallToolResult, TextContent, ToolAnnotations
from pydantic import BaseModel, Field

from kqueue import examinations
from kqueue.categories import CATEGORIES, Category
from kqueue.client import wire
from kqueue.client.transport import Accepted, check_each
from kqueue.contract import Backend, Precision, Request, Sanitizer, Verdict, parse_request
from kqueue.errors import AccessRefused, InvalidRequest, KqueueError, ServiceError, UnknownEvaluation
from kqueue.evidence import NEEDS, Facts
from kqueue.mcp import files, words
from kqueue.mcp.autopsy import dissect
from kqueue.mcp.door import Call, Caller, Door, caller_of
from kqueue.mcp.subject import judged_once
from kqueue.mcp.waiting import standing, verdicts
from kqueue.text import clean
from kqueue.tuning.halving import FINALISTS, REPEATS, Entry, Halving, Result, unknown
from kqueue.tuning.space import ORIGINAL, Space, from_values

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

#: Maximum number of kernels of one submission and of evaluations of one wait.
_MOST: Final = 100
#: Maximum number of rows of one list.
_MOST_ROWS: Final = 50
#: Maximum characters of a `repro.py` in an answer.
_MOST_REPRO: Final = 64_000
#: Number of tunings that compute at a time, because their CPU-bound work would block other requests.
_TUNING: Final = anyio.CapacityLimiter(1)

_Problem = Annotated[
    str,
    Field(
        description="PyTorch source with `class Model`, `get_inputs()` and `get_init_inputs()`, or `sha256:` and the "
        "hash of a stored problem, which `problems` lists. At most 1 MiB."
    ),
]
_Kernel = Annotated[str, Field(description="Python source with `class ModelNew`. At most 1 MiB.")]
_Written = Annotated[Backend, Field(description="The kernel's language. `torch` is plain PyTorch.")]
_Lane = Annotated[
    str,
    Field(description="`auto` (a GPU if there is one, else the CPU), `gpu`, `gpu.<model>` like `gpu.h200`, or `cpu`."),
]
_Settings = Annotated[
    dict[str, Any] | None,
    Field(
        description='Settings such as {"precision": "bf16"} or {"timing": {"enabled": false}}. The resource '
        "kqueue://settings lists all. By default fp32, 5 input sets and 100 timed calls."
    ),
]
_Label = Annotated[str | None, Field(description="A name that users see in lists.")]
_Priority = Annotated[
    Literal["interactive", "batch"],
    Field(description="`interactive` is judged before all `batch` work. Some tokens allow `batch` only."),
]
_Fresh = Annotated[bool, Field(description="Judge again, even if an equal evaluation has a verdict.")]
_Timeout = Annotated[
    float,
    Field(ge=0, le=600, description="Seconds to wait. Then the evaluation continues, and `wait` returns its verdict."),
]
_Id = Annotated[UUID, Field(description="The evaluation's id from `judge` or `submit`.")]
_Which = Annotated[str | None, Field(description="A problem's label, or the beginning of its hash.")]
_Rows = Annotated[int, Field(ge=1, le=_MOST_ROWS)]


class Judged(BaseModel):
    """One evaluation."""

    evaluation_id: str
    state: Annotated[str, Field(description="`done`, `queued`, `running`, or `open` for one of the last two.")]
    category: Annotated[str | None, Field(description="`passed` or the failure. Null without a verdict.")] = None
    blame: Annotated[str | None, Field(description="`none`, `candidate`, `problem`, `fleet` or `nobody`.")] = None
    passed: bool | None = None
    runtime_ms: float | None = None
    baseline_ms: Annotated[float | None, Field(description="The reference's time.")] = None
    speedup: float | None = None
    reused_from: Annotated[
        str | None, Field(description="The equal evaluation whose verdict was reused. Its times are not new.")
    ] = None


class Reported(Judged):
    """One evaluation with its report."""

    report: Annotated[str, Field(description="The same text as in the content.")]


class Waited(BaseModel):
    """Several evaluations, in the order of the ids."""

    done: int
    evaluations: list[Judged]


class Dissected(BaseModel):
    """The result of an autopsy."""

    category: str
    ended: Annotated[
        str,
        Field(description="`smallest`, `evaluations`, `time`, `not_again` (not reproduced) or `refused`."),
    ]
    before: Annotated[list[dict[str, Any]] | None, Field(description="Shapes and dtypes of the problem's inputs.")]
    after: Annotated[list[dict[str, Any]] | None, Field(description="The same for the smallest failing problem.")]
    elements_before: int | None
    elements_after: int | None
    fill: Annotated[str | None, Field(description="The values of floating inputs.")]
    evaluations: int
    seconds: float
    report: Annotated[str, Field(description="The same text as in the content.")]


class Variant(BaseModel):
    """One kernel of several."""

    kernel: _Kernel
    backend: _Written
    label: _Label = None

    def fields(self) -> dict[str, Any]:
        """Return its fields of a request."""
        return _given(kernel=self.kernel, backend=self.backend, kernel_label=self.label)


class Submitted(BaseModel):
    """The result of one kernel of a submission: either an id or an error."""

    evaluation_id: str | None
    error: Annotated[str | None, Field(description="The reason why it was refused.")]


class Submissions(BaseModel):
    """The results of the kernels, in the order of the kernels."""

    submitted: list[Submitted]


class Tried(BaseModel):
    """A configuration of a tuning, with its latest result."""

    values: Annotated[dict[str, str], Field(description="The values by name.")]
    original: Annotated[bool, Field(description="True for the original kernel.")]
    calls: Annotated[int, Field(description="Maximum number of timed calls.")]
    final: Annotated[bool, Field(description="True if it was in the last comparison.")]
    category: str
    runtime_ms: Annotated[float | None, Field(description="Median of the evaluations' times.")]
    speedup: float | None
    evaluation_id: str


class Tuned(BaseModel):
    """The result of a tuning."""

    tuning: Annotated[str, Field(description="To continue, call again with this id and the same arguments.")]
    state: Annotated[str, Field(description="`done`, or `open` if the time ran out.")]
    won: Annotated[bool, Field(description="True if there is a winner, which is the first configuration.")]
    beats_original: Annotated[bool, Field(description="True if the winner is faster than the original kernel.")]
    configurations: Annotated[list[Tried], Field(description=f"The best first, at most {_MOST_ROWS}.")]
    importances: Annotated[dict[str, float], Field(description="Importance of each name. The sum is 1. Can be empty.")]


class Rows(BaseModel):
    """A list. Its labels come from other users."""

    rows: list[dict[str, Any]]
    cursor: Annotated[str | None, Field(description="Cursor of the next page, or null on the last page.")] = None


def _with_advice(tool: Callable[_P, Awaitable[_T]]) -> Callable[_P, Awaitable[_T]]:
    """Return a tool whose errors contain advice to the agent."""

    @functools.wraps(tool)
    async def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return await tool(*args, **kwargs)
        except KqueueError as error:
            raise ToolError(_advice(error)) from None

    return wrapped


def _advice(error: KqueueError) -> str:
    message = clean(error)
    match error:
        case AccessRefused():
            return f"{message}. This is about this session's token and not the kernel: report it to the user."
        case ServiceError():
            return f"{message}. This says nothing about the kernel. Nothing is lost: call again in a minute."
        case UnknownEvaluation():
            return "no evaluation has this id: use one that `judge` or `submit` returned."
        case InvalidRequest():
            return f"{message}. Nothing was submitted: correct it and call again."
        case _:
            return message


@_with_advice
async def judge(
    call: Call,
    problem: _Problem,
    kernel: _Kernel,
    backend: _Written,
    lane: _Lane = "auto",
    settings: _Settings = None,
    problem_label: _Label = None,
    kernel_label: _Label = None,
    priority: _Priority = "interactive",
    fresh: _Fresh = False,
    timeout_s: _Timeout = 45.0,
) -> Annotated[CallToolResult, Reported]:
    """Judge one kernel against a problem, and wait for its verdict.

    The kernel is checked on several input sets, including hidden ones, and timed against the reference. The report of a
    failure has its location and details (first wrong values, source lines, compiler messages). The report of a right
    kernel has its time and its bottleneck. A kernel that fails is not an error of this tool.
    """
    caller = caller_of(call)
    shared = _given(
        problem=problem, lane=lane, settings=settings, problem_label=problem_label, priority=priority, reuse=not fresh
    )
    one = Variant(kernel=kernel, backend=backend, label=kernel_label)
    request = wire.with_key(parse_request(shared | one.fields()))
    accepted = wire.load_accepted(request, await caller.ask("POST", "/v1/evaluations", body=wire.dump_request(request)))
    return await _report(call, caller, accepted.evaluation_id, timeout_s, request.kernel)


@_with_advice
async def submit(
    call: Call,
    problem: _Problem,
    kernels: Annotated[list[Variant], Field(min_length=1, max_length=_MOST, description=f"At most {_MOST}.")],
    lane: _Lane = "auto",
    settings: _Settings = None,
    problem_label: _Label = None,
    batch: Annotated[str | None, Field(description="A name for all of them, which users see.")] = None,
    priority: _Priority = "batch",
    fresh: _Fresh = False,
) -> Annotated[CallToolResult, Submissions]:
    """Submit several kernels for one problem, and return their ids without waiting.

    A refused kernel does not affect the rest. Call `wait` with the ids.
    """
    caller = caller_of(call)
    shared = _given(
        problem=problem,
        lane=lane,
        settings=settings,
        problem_label=problem_label,
        batch=batch,
        priority=priority,
        reuse=not fresh,
    )
    entries = [
        wire.with_key(entry) if isinstance(entry, Request) else entry
        for entry in check_each(shared | one.fields() for one in kernels)
    ]
    rest = iter(await _submitted(caller, [entry for entry in entries if isinstance(entry, Request)]))
    outcomes = [next(rest) if isinstance(entry, Request) else entry for entry in entries]
    submitted = [
        Submitted(evaluation_id=None, error=words.short(outcome, 300))
        if isinstance(outcome, InvalidRequest)
        else Submitted(evaluation_id=str(outcome.evaluation_id), error=None)
        for outcome in outcomes
    ]
    lines = (f"{index}: {one.evaluation_id or f'REFUSED: {one.error}'}" for index, one in enumerate(submitted))
    return _result("\n".join(lines), Submissions(submitted=submitted))


@_with_advice
async def wait(
    call: Call,
    evaluation_ids: Annotated[list[UUID], Field(min_length=1, max_length=_MOST, description=f"At most {_MOST}.")],
    timeout_s: _Timeout = 45.0,
) -> Annotated[CallToolResult, Waited]:
    """Wait until evaluations have their verdicts, and list them in one line each.

    It returns when all are done, or after `timeout_s` with the verdicts so far. `verdict` returns the report of one.
    """
    caller = caller_of(call)
    ids = list(dict.fromkeys(evaluation_ids))
    done = await verdicts(call, caller, ids, timeout_s)
    late = [identity for identity in ids if identity not in done]
    why = (await standing(caller, late[0]))[1] if late else ""
    listed: list[Judged] = []
    lines: list[str] = []
    for identity in ids:
        if verdict := done.get(identity):
            listed.append(Judged(evaluation_id=str(identity), state="done", **words.numbers(verdict)))
            label = f" ({words.short(verdict.kernel_label)})" if verdict.kernel_label else ""
            lines.append(f"{identity}{label}: {words.headline(verdict)}: {words.short(verdict.message)}")
        else:
            listed.append(Judged(evaluation_id=str(identity), state="open"))
            lines.append(f"no verdict yet: {why if identity == late[0] else identity}")
    more = " The rest continue: call `wait` again with their ids." if late else ""
    return _result(
        f"{len(done)} of {len(ids)} done.{more}\n"
        + words.quoted("\n".join(lines), "evaluations, with untrusted labels and messages"),
        Waited(done=len(done), evaluations=listed),
    )


@_with_advice
async def tune(
    call: Call,
    problem: _Problem,
    kernel: _Kernel,
    backend: _Written,
    grid: Annotated[
        dict[str, list[int | float | bool | str]],
        Field(
            description='Names in the kernel with the values to try, such as {"BLOCK": [64, 128, 256]}: constants of '
            "the module, #define in strings, keywords of Triton launches (`num_warps`), defaults of "
            "`ModelNew.__init__`. If several of these have the same name, use `constant:BLOCK`, `macro:BLOCK`, "
            "`launch:BLOCK` or `argument:BLOCK`."
        ),
    ],
    trials: Annotated[int, Field(ge=1, le=_MOST, description="Maximum number of configurations to judge.")] = 32,
    finalists: Annotated[int, Field(ge=1, le=10, description="Configurations in the last comparison.")] = FINALISTS,
    repeats: Annotated[int, Field(ge=2, le=10, description="Evaluations of each finalist.")] = REPEATS,
    lane: _Lane = "auto",
    settings: _Settings = None,
    problem_label: _Label = None,
    tuning: Annotated[
        str | None,
        Field(
            pattern="^[0-9a-f]{16}$",
            description="Id from an earlier answer, to continue that tuning with the same arguments.",
        ),
    ] = None,
    timeout_s: _Timeout = 45.0,
) -> Annotated[CallToolResult, Tuned]:
    """Find the best values for names in a kernel: judge all or some configurations, and the best ones repeatedly.

    Wrong kernels drop out. The last comparison judges the best few configurations and the original kernel under equal
    conditions. The original kernel wins unless another one is faster by more than the spread. If the time runs out,
    call again with `tuning` and the same arguments: nothing is judged twice.
    """
    began, caller = time.monotonic(), caller_of(call)
    name = tuning or secrets.token_hex(8)
    shared = _given(
        problem=problem,
        backend=backend,
        lane=lane,
        problem_label=problem_label,
        batch=f"tune-{name}",
        settings=settings,
    )
    first = parse_request(shared | {"kernel": kernel})
    space = await _in_turn(Space, first.kernel, from_values(grid))
    halving = Halving(space, first.settings.timing.calls, trials, finalists, repeats)
    results: list[Result] = []
    judged: list[Verdict] = []
    while (batch := await _in_turn(halving.next, results)) is not None:
        keys = [f"tune/{name}/{index}" for index, _ in enumerate(batch, len(results))]
        requests = await _in_turn(_due, first, space, batch, keys)
        accepted = await _submitted(caller, requests)
        for one in accepted:
            if isinstance(one, InvalidRequest):
                raise one
        ids = [one.evaluation_id for one in accepted if not isinstance(one, InvalidRequest)]
        what = f"{batch[0].calls} calls{', the last comparison' if batch[0].repeat else ''}: "
        came = await verdicts(call, caller, ids, timeout_s, began=began, what=what)
        done = [(entry, came[identity]) for entry, identity in zip(batch, ids, strict=True) if identity in came]
        judged += [one for _, one in done]
        results += [Result(entry, one.passed, _inverse_runtime(one)) for entry, one in done]
        if len(came) < len(ids):
            open_ = f"No winner yet. {what}{len(came)} of {len(ids)} judged. The rest continues: call `tune` again."
            return await _in_turn(_tuned, name, halving, results, judged, open_)
    return await _in_turn(_tuned, name, halving, results, judged, None)


@_with_advice
async def verdict(call: Call, evaluation_id: _Id) -> Annotated[CallToolResult, Reported]:
    """Report on one evaluation: its verdict in the form of `judge`, or the reason why it has none yet."""
    return await _report(call, caller_of(call), evaluation_id, 0.0, None)


@_with_advice
async def autopsy(
    call: Call,
    evaluation_id: _Id,
    budget_s: Annotated[
        float, Field(ge=1, le=600, description="Seconds of the search. The best result by then counts.")
    ] = 40.0,
    priority: _Priority = "interactive",
    repro: Annotated[
        bool, Field(description=f"Return repro.py too, if it has at most {_MOST_REPRO} characters.")
    ] = False,
) -> Annotated[CallToolResult, Dissected]:
    """Find the smallest shape and the simplest input on which a failed kernel still fails in the same way.

    A few dozen smaller problems are judged. The report has the shapes before and after, the first wrong values, and on
    request `repro.py`: a failing program that needs only torch. It runs the kernel without a sandbox.
    """
    report = await dissect(call, caller_of(call), evaluation_id, budget_s, priority)
    text = words.quoted("\n".join(report.lines()), "autopsy, with text of the kernel")
    if repro and report.repro is not None:
        if len(report.repro) > _MOST_REPRO:
            text += f"\nrepro.py has {len(report.repro)} characters: `kqueue autopsy {evaluation_id}` writes it."
        else:
            text += f"\n{words.quoted(report.repro, 'repro.py, with untrusted sources')}"
    record = {name: value for name, value in report.summary().items() if name in Dissected.model_fields}
    return _result(text, Dissected.model_validate(record | {"report": text}))


@_with_advice
async def sanitize(
    call: Call,
    evaluation_id: _Id,
    tools: Annotated[
        list[Sanitizer] | None, Field(description="By default all four. Each takes several seconds.", max_length=4)
    ] = None,
    whole: Annotated[
        bool, Field(description="Use the problem's own sizes. By default they are halved to at most 128.")
    ] = False,
    priority: _Priority = "interactive",
    timeout_s: _Timeout = 120.0,
) -> Annotated[CallToolResult, Reported]:
    """Run an evaluation's kernel under compute-sanitizer: out-of-bounds access, races, unwritten memory, barriers.

    The report has the kernel, line, thread, address and allocation. If the kernel gets another verdict with small
    sizes, it runs with the problem's own sizes.
    """
    caller = caller_of(call)
    request, earlier = await judged_once(caller, evaluation_id, "sanitize", priority)
    requests = examinations.sanitizing(request, tools or list(Sanitizer), earlier.category, whole=whole)
    return await _examined(call, caller, requests, timeout_s)


@_with_advice
async def profile(
    call: Call, evaluation_id: _Id, priority: _Priority = "interactive", timeout_s: _Timeout = 120.0
) -> Annotated[CallToolResult, Reported]:
    """Profile each kernel of one call with Nsight Compute: memory traffic, operations, occupancy, stalls.

    Use it on a right kernel that should be faster.
    """
    caller = caller_of(call)
    request, earlier = await judged_once(caller, evaluation_id, "profile", priority)
    if examinations.is_profiled(earlier.evidence):
        return await _report(call, caller, evaluation_id, 0.0, request.kernel)
    # The problem's name suffices for a token that can only name stored problems.
    stored = request.model_copy(update={"problem": request.problem_name})
    return await _examined(call, caller, examinations.profiling(stored), timeout_s)


@_with_advice
async def cancel(call: Call, evaluation_id: _Id) -> str:
    """Cancel an evaluation, and stop it if it runs. An evaluation with a verdict keeps the verdict."""
    answer = await caller_of(call).ask("POST", f"/v1/evaluations/{evaluation_id}/cancel")
    return "It is cancelled." if answer["cancelled"] else "It already had its verdict, and keeps it."


async def explain(
    category: Annotated[Category | None, Field(description="By default all, one line each.")] = None,
) -> str:
    """Explain a category of verdicts: its meaning, who is to blame, advice, and the facts in such verdicts."""
    if category is None:
        return "\n".join(f"{row.category} (to blame: {row.blame}): {row.meaning}" for row in CATEGORIES.values())
    needs = NEEDS[category]
    facts = "".join(
        f"\n- {name}: {Facts.model_fields[name].description or ''}" for name in (*needs.facts, *needs.one_of)
    )
    return f"{category}: {category.info.meaning}\nTo blame: {category.blame}. {words.next_step(category.blame)}" + (
        f"\nFacts in its verdict.json:{facts}" if facts else ""
    )


@_with_advice
async def problems(
    call: Call,
    problem: _Which = None,
    limit: _Rows = 20,
    cursor: Annotated[str | None, Field(description="Cursor from an earlier answer, for the next page.")] = None,
) -> Annotated[CallToolResult, Rows]:
    """List the stored problems, the latest first.

    `judge` accepts their names. `read` kqueue://problems/HASH returns a source.
    """
    query = _given(problem=problem, limit=limit, cursor=cursor)
    answer = await caller_of(call).ask("GET", "/v1/problems", query=query)
    rows = [
        {
            "problem": f"sha256:{row['problem_hash']}",
            "problem_label": words.short(row["problem_label"] or ""),
            "bytes": row["bytes"],
            "created_at": row["created_at"],
        }
        for row in answer["problems"]
    ]
    more = "" if answer["cursor"] is None else f"\nThere are more: call again with cursor {answer['cursor']}"
    lines = (f"{row['problem']} {row['bytes']} bytes, {row['problem_label']}" for row in rows)
    return _table(lines, "stored problems, with untrusted labels", more, Rows(rows=rows, cursor=answer["cursor"]))


@_with_advice
async def leaderboard(
    call: Call,
    problem: _Which = None,
    precision: Precision | None = None,
    device: Annotated[str | None, Field(description="A device model's name, or a part of it.")] = None,
    limit: _Rows = 20,
) -> Annotated[CallToolResult, Rows]:
    """List the fastest right kernel of each problem, precision and device model, the largest speedup first.

    `read` kqueue://evaluations/ID/kernel.py returns a kernel's source.
    """
    query = _given(problem=problem, precision=precision, device=device, limit=limit)
    answer = await caller_of(call).ask("GET", "/v1/leaderboard", query=query)
    rows = [
        {
            "problem": f"sha256:{row['problem_hash']}",
            **{name: words.short(row[name] or "") for name in ("problem_label", "kernel_label", "device")},
            **{
                name: row[name]
                for name in ("precision", "backend", "runtime_ms", "baseline_ms", "speedup", "evaluation_id")
            },
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


@_with_advice
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
    judge: _SUBMITS,
    submit: _SUBMITS,
    wait: _LOOKS,
    tune: _SUBMITS,
    verdict: _LOOKS,
    autopsy: _SUBMITS,
    sanitize: _SUBMITS,
    profile: _SUBMITS,
    cancel: _ENDS,
    explain: _LOOKS,
    problems: _LOOKS,
    leaderboard: _LOOKS,
    read: _LOOKS,
}


def register(server: MCPServer[Door]) -> None:
    """Add the tools to ``server``."""
    for tool, hints in _TOOLS.items():
        server.add_tool(tool, annotations=hints)


async def _report(
    call: Call, caller: Caller, evaluation_id: UUID, timeout_s: float, kernel: str | None
) -> CallToolResult:
    """Wait for an evaluation and return its report. ``kernel`` is its source, if known."""
    verdict: Verdict | None = (await verdicts(call, caller, [evaluation_id], timeout_s)).get(evaluation_id)
    if verdict is None:
        state, why = await standing(caller, evaluation_id)
        text = (
            f"No verdict yet. The evaluation is {state}.\n{words.quoted(why, 'why it waits')}\n"
            f"It continues: call `wait` with {evaluation_id}, or `cancel` it."
        )
        return _result(text, Reported(evaluation_id=str(evaluation_id), state=state, report=text))
    if kernel is None:
        kernel = await caller.read(f"/v1/evaluations/{evaluation_id}/artifacts/kernel.py")
    text = words.feedback(verdict, kernel)
    report = Reported(evaluation_id=str(evaluation_id), state="done", report=text, **words.numbers(verdict))
    return _result(text, report)


async def _examined(call: Call, caller: Caller, requests: examinations.Requests, timeout_s: float) -> CallToolResult:
    """Submit the requests of an examination one after another, and return the report on the last one."""
    began = time.monotonic()
    request = next(requests)
    while True:
        [accepted] = await _submitted(caller, [wire.with_key(request)])
        if isinstance(accepted, InvalidRequest):
            raise accepted
        identity = accepted.evaluation_id
        left_s = max(0.0, began + timeout_s - time.monotonic())
        verdict = (await verdicts(call, caller, [identity], left_s)).get(identity)
        if verdict is not None:
            try:
                request = requests.send(verdict)
                continue
            except StopIteration:
                pass
        return await _report(call, caller, identity, 0.0, request.kernel)


async def _submitted(caller: Caller, requests: Iterable[Request]) -> list[Accepted | InvalidRequest]:
    """Submit requests that have keys, and return the result of each."""
    results: list[Accepted | InvalidRequest] = []
    for chunk in wire.chunks(requests):
        body = {"entries": [wire.dump_request(request) for request in chunk]}
        answer = await caller.ask("POST", "/v1/evaluations/each", body=body)
        results += [wire.load_result(request, one) for request, one in zip(chunk, answer["results"], strict=True)]
    return results


async def _in_turn(work: Callable[[*_Ts], _T], *args: *_Ts) -> _T:
    """Run ``work`` in a thread, one tuning at a time, and return its result."""
    return await anyio.to_thread.run_sync(work, *args, limiter=_TUNING)


def _due(first: Request, space: Space, batch: Sequence[Entry], keys: Sequence[str]) -> list[Request]:
    """Return the requests for a batch of a tuning."""

    def one(entry: Entry, key: str) -> Request:
        timing = first.settings.timing.model_copy(update={"calls": entry.calls})
        return first.model_copy(
            update={
                "kernel": space.source(entry.config),
                "settings": first.settings.model_copy(update={"timing": timing}),
                "idempotency_key": key,
                "reuse": entry.repeat == 0,
            }
        )

    return [one(entry, key) for entry, key in zip(batch, keys, strict=True)]


def _inverse_runtime(verdict: Verdict) -> float | None:
    if verdict.passed:
        return 1e3 / verdict.runtime_ms if verdict.runtime_ms else None
    return 0.0 if verdict.judged else None


def _tuned(
    name: str, halving: Halving, results: Sequence[Result], judged: Sequence[Verdict], open_: str | None
) -> CallToolResult:
    """Return the result of a tuning. ``open_`` is its progress in words, or None if it is done."""
    winner = None if open_ else halving.winner(results)
    configurations: list[Tried] = []
    for one in halving.standings(results, winner)[:_MOST_ROWS]:
        middle = judged[one.middle]
        wrong = next((judged[index] for index in one.places if not judged[index].passed), middle)
        configurations.append(
            Tried(
                values=halving.space.shown(one.config),
                original=one.config == ORIGINAL,
                calls=one.calls,
                final=one.final,
                category=wrong.category.value,
                runtime_ms=middle.runtime_ms,
                speedup=middle.speedup,
                evaluation_id=str(wrong.evaluation_id),
            )
        )
    if open_:
        head = f"{open_} Give tuning={name}."
    elif unknown(results):
        head = "No winner: the original kernel was not judged. See its `verdict`, and tune again without `tuning`."
    elif winner is None:
        head = "No kernel is right: `verdict` returns the report of each."
    elif winner.beats:
        head = f"The first is the winner: read kqueue://evaluations/{configurations[0].evaluation_id}/kernel.py."
    elif winner.compared:
        head = "No configuration beats the original kernel by more than its spread: the original is the winner."
    elif winner.config == ORIGINAL:
        head = "No other configuration is known to be right: the original kernel is the winner."
    else:
        head = "The first is the winner. It was not compared, because the original kernel is not right."
    lines = [
        " ".join((one.evaluation_id, *(f"{key}={value}" for key, value in one.values.items())))
        + f"{' (original)' if one.original else ''}: {one.category}"
        + ("" if one.runtime_ms is None else f", {one.runtime_ms:.4g} ms")
        + ("" if one.speedup is None else f", {one.speedup:.3g}x")
        + f", {one.calls} calls{', last comparison' if one.final else ''}"
        for one in configurations
    ]
    tuned = Tuned(
        tuning=name,
        state="open" if open_ else "done",
        won=winner is not None,
        beats_original=winner is not None and winner.beats,
        configurations=configurations,
        importances={} if open_ else halving.importances(results),
    )
    shares = "".join(f"\nImportance of {key}: {share:.2f}" for key, share in tuned.importances.items())
    return _result(
        f"{head}\n{words.quoted(chr(10).join(lines), 'configurations, with values of the kernel')}{shares}", tuned
    )


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _table(lines: Iterable[str], what: str, more: str, rows: Rows) -> CallToolResult:
    text = "\n".join(lines)
    return _result((words.quoted(text, what) if text else "There are none.") + more, rows)


def _result(text: str, content: BaseModel) -> CallToolResult:
    return CallToolResult(
        content=[TextContent(type="text", text=text)], structured_content=content.model_dump(mode="json")
    )
