"""The tools. Their docstrings and the fields' descriptions are what agents read."""

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
from kqueue.client.entries import check_each
from kqueue.client.transport import Accepted
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

#: The most kernels of one submission, evaluations of one wait, and rows of one list.
_MOST: Final = 100
_MOST_ROWS: Final = 50
#: The longest `repro.py` that is told, in characters.
_MOST_REPRO: Final = 64_000
#: Tunings that look for names in sources, or choose, at a time: they keep the others from the interpreter.
_TUNING: Final = anyio.CapacityLimiter(1)

_Problem = Annotated[
    str,
    Field(
        description="PyTorch source with `class Model`, `get_inputs()` and `get_init_inputs()`; or `sha256:` and the "
        "hash of a stored problem, as `problems` lists them. At most 1 MiB."
    ),
]
_Kernel = Annotated[str, Field(description="Python source with `class ModelNew`. At most 1 MiB.")]
_Written = Annotated[Backend, Field(description="What the kernel is written in; `torch` for plain PyTorch.")]
_Lane = Annotated[
    str,
    Field(description="`auto` (a GPU if there is one, else the CPU), `gpu`, `gpu.<model>` as `gpu.h200`, or `cpu`."),
]
_Settings = Annotated[
    dict[str, Any] | None,
    Field(
        description='How to judge, such as {"precision": "bf16"} or {"timing": {"enabled": false}}; the resource '
        "kqueue://settings has all. By default fp32, 5 input sets and 100 timed calls."
    ),
]
_Label = Annotated[str | None, Field(description="A name for people, who see it in lists.")]
_Priority = Annotated[
    Literal["interactive", "batch"],
    Field(description="`interactive` is judged before all `batch` work. Some tokens allow `batch` only."),
]
_Fresh = Annotated[bool, Field(description="Judge anew, even if an equal evaluation has a verdict.")]
_Timeout = Annotated[
    float,
    Field(
        ge=0, le=600, description="Seconds to wait. After that the evaluation goes on, and `wait` finds its verdict."
    ),
]
_Id = Annotated[UUID, Field(description="The evaluation's id, as `judge` and `submit` tell it.")]
_Which = Annotated[str | None, Field(description="A problem's label, or the beginning of its hash.")]
_Rows = Annotated[int, Field(ge=1, le=_MOST_ROWS)]


class Judged(BaseModel):
    """One evaluation."""

    evaluation_id: str
    state: Annotated[str, Field(description="`done`, `queued` or `running`; `open` for either of the last two.")]
    category: Annotated[str | None, Field(description="`passed`, or how it failed; null without a verdict.")] = None
    blame: Annotated[str | None, Field(description="`none`, `candidate`, `problem`, `fleet` or `nobody`.")] = None
    passed: bool | None = None
    runtime_ms: float | None = None
    baseline_ms: Annotated[float | None, Field(description="The reference's time.")] = None
    speedup: float | None = None
    reused_from: Annotated[
        str | None, Field(description="The equal evaluation whose verdict this is: its times are no new measurement.")
    ] = None


class Reported(Judged):
    """One evaluation, in words too."""

    report: Annotated[str, Field(description="The same text as in the content.")]


class Waited(BaseModel):
    """Several evaluations, in the order of the ids."""

    done: int
    evaluations: list[Judged]


class Dissected(BaseModel):
    """What an autopsy found."""

    category: str
    ended: Annotated[
        str,
        Field(description="`smallest`, `evaluations`, `time`, `not_again` (it did not fail so again) or `refused`."),
    ]
    before: Annotated[list[dict[str, Any]] | None, Field(description="Shapes and dtypes of the problem's inputs.")]
    after: Annotated[list[dict[str, Any]] | None, Field(description="The same of the smallest failing problem.")]
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
    """What became of one kernel of a submission: one of the two."""

    evaluation_id: str | None
    error: Annotated[str | None, Field(description="Why it was refused.")]


class Submissions(BaseModel):
    """What became of the kernels, in their order."""

    submitted: list[Submitted]


class Tried(BaseModel):
    """A configuration of a tuning, as far as it came."""

    values: Annotated[dict[str, str], Field(description="The values by name.")]
    original: Annotated[bool, Field(description="True for the kernel as given.")]
    calls: Annotated[int, Field(description="Timed calls at most.")]
    final: Annotated[bool, Field(description="True if it was in the last comparison.")]
    category: str
    runtime_ms: Annotated[float | None, Field(description="Of several evaluations the middle one's.")]
    speedup: float | None
    evaluation_id: str


class Tuned(BaseModel):
    """What a tuning has found."""

    tuning: Annotated[str, Field(description="Give it, and all else as it was, to go on.")]
    state: Annotated[str, Field(description="`done`, or `open` if the time was over before.")]
    won: Annotated[bool, Field(description="True if there is a winner, which is the first configuration.")]
    beats_original: Annotated[bool, Field(description="True if that is faster than the kernel as given.")]
    configurations: Annotated[list[Tried], Field(description=f"The best first, at most {_MOST_ROWS}.")]
    importances: Annotated[dict[str, float], Field(description="How much each name decides; together 1, or empty.")]


class Rows(BaseModel):
    """A list. Labels in it were given by other users."""

    rows: list[dict[str, Any]]
    cursor: Annotated[str | None, Field(description="Give it to get those that follow; null for the end.")] = None


def _told(tool: Callable[_P, Awaitable[_T]]) -> Callable[_P, Awaitable[_T]]:
    """Let a tool tell its errors so that an agent can act on them."""

    @functools.wraps(tool)
    async def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return await tool(*args, **kwargs)
        except KqueueError as error:
            raise ToolError(_advice(error)) from None

    return wrapped


def _advice(error: KqueueError) -> str:
    said = clean(error)
    match error:
        case AccessRefused():
            return f"{said}. This is about this session's token and not the kernel: tell whoever gave you the token."
        case ServiceError():
            return f"{said}. This says nothing about the kernel. Nothing is lost: call again in a minute."
        case UnknownEvaluation():
            return "no evaluation has this id: give one that `judge` or `submit` told."
        case InvalidRequest():
            return f"{said}. Nothing was submitted: correct it and call again."
        case _:
            return said


@_told
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

    Is it right on several input sets, hidden ones included, and how fast is it beside the reference? The report says
    what failed, where and how (first wrong values, lines of the source, what a compiler said), or the time and what
    limits it. A kernel that fails is an answer, not an error of this tool.
    """
    caller = caller_of(call)
    shared = _given(
        problem=problem, lane=lane, settings=settings, problem_label=problem_label, priority=priority, reuse=not fresh
    )
    one = Variant(kernel=kernel, backend=backend, label=kernel_label)
    request = wire.with_key(parse_request(shared | one.fields()))
    accepted = wire.load_accepted(request, await caller.ask("POST", "/v1/evaluations", body=wire.dump_request(request)))
    return await _report(call, caller, accepted.evaluation_id, timeout_s, request.kernel)


@_told
async def submit(
    call: Call,
    problem: _Problem,
    kernels: Annotated[list[Variant], Field(min_length=1, max_length=_MOST, description=f"At most {_MOST}.")],
    lane: _Lane = "auto",
    settings: _Settings = None,
    problem_label: _Label = None,
    batch: Annotated[str | None, Field(description="A name for all of them, for people.")] = None,
    priority: _Priority = "batch",
    fresh: _Fresh = False,
) -> Annotated[CallToolResult, Submissions]:
    """Submit several kernels for one problem, and return their ids without waiting.

    A kernel that is refused does not affect the others. Call `wait` with the ids.
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
    lines = (f"{place}: {one.evaluation_id or f'REFUSED: {one.error}'}" for place, one in enumerate(submitted))
    return _result("\n".join(lines), Submissions(submitted=submitted))


@_told
async def wait(
    call: Call,
    evaluation_ids: Annotated[list[UUID], Field(min_length=1, max_length=_MOST, description=f"At most {_MOST}.")],
    timeout_s: _Timeout = 45.0,
) -> Annotated[CallToolResult, Waited]:
    """Wait until evaluations have their verdicts, and list them: one line each.

    It returns as soon as all are done, or after `timeout_s` with those that are. `verdict` has the report of one.
    """
    caller = caller_of(call)
    ids = list(dict.fromkeys(evaluation_ids))
    found = await verdicts(call, caller, ids, timeout_s)
    late = [identity for identity in ids if identity not in found]
    why = (await standing(caller, late[0]))[1] if late else ""
    listed: list[Judged] = []
    lines: list[str] = []
    for identity in ids:
        if verdict := found.get(identity):
            listed.append(Judged(evaluation_id=str(identity), state="done", **words.numbers(verdict)))
            label = f" ({words.short(verdict.kernel_label)})" if verdict.kernel_label else ""
            lines.append(f"{identity}{label}: {words.headline(verdict)}: {words.short(verdict.message)}")
        else:
            listed.append(Judged(evaluation_id=str(identity), state="open"))
            lines.append(f"no verdict yet: {why if identity == late[0] else identity}")
    more = " The others go on: call `wait` again with their ids." if late else ""
    return _result(
        f"{len(found)} of {len(ids)} done.{more}\n"
        + words.quoted("\n".join(lines), "evaluations, with labels and messages of others"),
        Waited(done=len(found), evaluations=listed),
    )


@_told
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
            "`ModelNew.__init__`. Where several of these have the name: `constant:BLOCK`, `macro:BLOCK`, "
            "`launch:BLOCK` or `argument:BLOCK`."
        ),
    ],
    trials: Annotated[int, Field(ge=1, le=_MOST, description="Configurations to judge at most.")] = 32,
    finalists: Annotated[int, Field(ge=1, le=10, description="Configurations in the last comparison.")] = FINALISTS,
    repeats: Annotated[int, Field(ge=2, le=10, description="Evaluations of each of them there.")] = REPEATS,
    lane: _Lane = "auto",
    settings: _Settings = None,
    problem_label: _Label = None,
    tuning: Annotated[
        str | None,
        Field(
            pattern="^[0-9a-f]{16}$",
            description="From an earlier answer, with all else as it was there: goes on with that tuning.",
        ),
    ] = None,
    timeout_s: _Timeout = 45.0,
) -> Annotated[CallToolResult, Tuned]:
    """Find the best values for names in a kernel: all or some configurations are judged, the best again and again.

    Wrong kernels drop out. At last the best few and the kernel as given are judged side by side. The winner is the
    kernel as given, unless another is faster beyond the spread. If the time is over before, call it again with `tuning`
    and the same arguments: nothing is judged twice.
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
        keys = [f"tune/{name}/{place}" for place, _ in enumerate(batch, len(results))]
        requests = await _in_turn(_due, first, space, batch, keys)
        accepted = await _submitted(caller, requests)
        for one in accepted:
            if isinstance(one, InvalidRequest):
                raise one
        ids = [one.evaluation_id for one in accepted if not isinstance(one, InvalidRequest)]
        what = f"{batch[0].calls} calls{', the last comparison' if batch[0].repeat else ''}: "
        found = await verdicts(call, caller, ids, timeout_s, began=began, what=what)
        done = [(entry, found[identity]) for entry, identity in zip(batch, ids, strict=True) if identity in found]
        judged += [one for _, one in done]
        results += [Result(entry, one.passed, _inverse_runtime(one)) for entry, one in done]
        if len(found) < len(ids):
            left = f"{what}{len(found)} of {len(ids)} judged"
            open_ = f"No winner yet; {left}. The rest goes on: call `tune` again."
            return await _in_turn(_tuned, name, halving, results, judged, open_)
    return await _in_turn(_tuned, name, halving, results, judged, None)


@_told
async def verdict(call: Call, evaluation_id: _Id) -> Annotated[CallToolResult, Reported]:
    """Report on one evaluation: its verdict as `judge` tells it, or why it has none yet."""
    return await _report(call, caller_of(call), evaluation_id, 0.0, None)


@_told
async def autopsy(
    call: Call,
    evaluation_id: _Id,
    budget_s: Annotated[
        float, Field(ge=1, le=600, description="Seconds to search for; the best that was found by then counts.")
    ] = 40.0,
    priority: _Priority = "interactive",
    repro: Annotated[
        bool, Field(description=f"Tell repro.py too, if it has at most {_MOST_REPRO} characters.")
    ] = False,
) -> Annotated[CallToolResult, Dissected]:
    """Find the smallest shape and the plainest input on which a failed kernel still fails in the same way.

    Smaller problems are judged, a few dozen. The report has the shapes before and after, the first wrong values, and on
    request `repro.py`: a program that needs torch alone and fails by itself. It runs the kernel without a sandbox.
    """
    found = await dissect(call, caller_of(call), evaluation_id, budget_s, priority)
    text = words.quoted("\n".join(found.lines()), "autopsy, with words of the kernel")
    if repro and found.repro is not None:
        if len(found.repro) > _MOST_REPRO:
            text += f"\nrepro.py has {len(found.repro)} characters: `kqueue autopsy {evaluation_id}` writes it."
        else:
            text += f"\n{words.quoted(found.repro, 'repro.py, with sources of others')}"
    record = {name: value for name, value in found.summary().items() if name in Dissected.model_fields}
    return _result(text, Dissected.model_validate(record | {"report": text}))


@_told
async def sanitize(
    call: Call,
    evaluation_id: _Id,
    tools: Annotated[
        list[Sanitizer] | None, Field(description="By default all four; each takes several seconds.", max_length=4)
    ] = None,
    whole: Annotated[
        bool, Field(description="Leave the problem's sizes as they are; else they are halved to at most 128.")
    ] = False,
    priority: _Priority = "interactive",
    timeout_s: _Timeout = 120.0,
) -> Annotated[CallToolResult, Reported]:
    """Run an evaluation's kernel under compute-sanitizer: out-of-bounds access, races, unwritten memory, barriers.

    The report says kernel, line, thread, address and allocation. If the kernel fares differently with small sizes, it
    is run with the problem's own.
    """
    caller = caller_of(call)
    request, found = await judged_once(caller, evaluation_id, "sanitize", priority)
    requests = examinations.sanitizing(request, tools or list(Sanitizer), found.category, whole=whole)
    return await _examined(call, caller, requests, timeout_s)


@_told
async def profile(
    call: Call, evaluation_id: _Id, priority: _Priority = "interactive", timeout_s: _Timeout = 120.0
) -> Annotated[CallToolResult, Reported]:
    """Count with Nsight Compute what each kernel of one call does: traffic, operations, occupancy, waiting.

    Use it on a right kernel that should be faster.
    """
    caller = caller_of(call)
    request, found = await judged_once(caller, evaluation_id, "profile", priority)
    if examinations.is_profiled(found.evidence):
        return await _report(call, caller, evaluation_id, 0.0, request.kernel)
    # By its name, so that a token for stored problems will do.
    stored = request.model_copy(update={"problem": request.problem_name})
    return await _examined(call, caller, examinations.profiling(stored), timeout_s)


@_told
async def cancel(call: Call, evaluation_id: _Id) -> str:
    """End an evaluation without a result, and stop it where it runs. One that has its verdict keeps it."""
    answer = await caller_of(call).ask("POST", f"/v1/evaluations/{evaluation_id}/cancel")
    return "It is cancelled." if answer["cancelled"] else "It had its verdict already, and keeps it."


async def explain(
    category: Annotated[Category | None, Field(description="By default all, one line each.")] = None,
) -> str:
    """Explain a category of verdicts: what it means, who is to blame, what to do, and which facts come with it."""
    if category is None:
        return "\n".join(f"{row.category} (to blame: {row.blame}): {row.meaning}" for row in CATEGORIES.values())
    needs = NEEDS[category]
    facts = "".join(
        f"\n- {name}: {Facts.model_fields[name].description or ''}" for name in (*needs.facts, *needs.one_of)
    )
    return f"{category}: {category.info.meaning}\nTo blame: {category.blame}. {words.next_step(category.blame)}" + (
        f"\nFacts in its verdict.json:{facts}" if facts else ""
    )


@_told
async def problems(
    call: Call,
    problem: _Which = None,
    limit: _Rows = 20,
    cursor: Annotated[str | None, Field(description="From an earlier answer: what follows it.")] = None,
) -> Annotated[CallToolResult, Rows]:
    """List the stored problems, the latest first.

    `judge` takes their names. `read` kqueue://problems/HASH has a source.
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
    return _table(lines, "stored problems, with labels of others", more, Rows(rows=rows, cursor=answer["cursor"]))


@_told
async def leaderboard(
    call: Call,
    problem: _Which = None,
    precision: Precision | None = None,
    device: Annotated[str | None, Field(description="A device model's name, or a part of it.")] = None,
    limit: _Rows = 20,
) -> Annotated[CallToolResult, Rows]:
    """List the fastest right kernel of each problem, precision and device model, the largest speedup first.

    `read` kqueue://evaluations/ID/kernel.py has a kernel's source.
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
    return _table(lines, "the fastest kernels, with labels of others", "", Rows(rows=rows))


@_told
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
    """Read a source, a log or evidence: the same as this server's resources. Long ones come in pages."""
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
    """Give ``server`` its tools."""
    for tool, hints in _TOOLS.items():
        server.add_tool(tool, annotations=hints)


async def _report(
    call: Call, caller: Caller, evaluation_id: UUID, timeout_s: float, kernel: str | None
) -> CallToolResult:
    """Return the report on one evaluation, after waiting for it; ``kernel`` is its source, where that is known."""
    found: Verdict | None = (await verdicts(call, caller, [evaluation_id], timeout_s)).get(evaluation_id)
    if found is None:
        state, why = await standing(caller, evaluation_id)
        text = (
            f"No verdict yet; the evaluation is {state}.\n{words.quoted(why, 'why it waits')}\n"
            f"It goes on: call `wait` with {evaluation_id}, or `cancel` it."
        )
        return _result(text, Reported(evaluation_id=str(evaluation_id), state=state, report=text))
    if kernel is None:
        kernel = await caller.read(f"/v1/evaluations/{evaluation_id}/artifacts/kernel.py")
    text = words.feedback(found, kernel)
    told = Reported(evaluation_id=str(evaluation_id), state="done", report=text, **words.numbers(found))
    return _result(text, told)


async def _examined(call: Call, caller: Caller, requests: examinations.Requests, timeout_s: float) -> CallToolResult:
    """Have the requests of an examination judged, and return the report on the last one."""
    began = time.monotonic()
    request = next(requests)
    while True:
        [accepted] = await _submitted(caller, [wire.with_key(request)])
        if isinstance(accepted, InvalidRequest):
            raise accepted
        identity = accepted.evaluation_id
        left_s = max(0.0, began + timeout_s - time.monotonic())
        found = (await verdicts(call, caller, [identity], left_s)).get(identity)
        if found is not None:
            try:
                request = requests.send(found)
                continue
            except StopIteration:
                pass
        return await _report(call, caller, identity, 0.0, request.kernel)


async def _submitted(caller: Caller, requests: Iterable[Request]) -> list[Accepted | InvalidRequest]:
    """Submit requests that have a key, and return what became of each."""
    results: list[Accepted | InvalidRequest] = []
    for chunk in wire.chunks(requests):
        body = {"entries": [wire.dump_request(request) for request in chunk]}
        answer = await caller.ask("POST", "/v1/evaluations/each", body=body)
        results += [wire.load_result(request, one) for request, one in zip(chunk, answer["results"], strict=True)]
    return results


async def _in_turn(work: Callable[[*_Ts], _T], *args: *_Ts) -> _T:
    """Return what ``work`` does for a tuning, in a thread that has its turn after those of other tunings."""
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
    """Return what a tuning has found; ``open_`` says in words what it still lacks, None if it is over."""
    winner = None if open_ else halving.winner(results)
    configurations: list[Tried] = []
    for one in halving.standings(results, winner)[:_MOST_ROWS]:
        middle = judged[one.middle]
        wrong = next((judged[place] for place in one.places if not judged[place].passed), middle)
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
        head = "No winner: nothing is known of the kernel as given. See its `verdict`, and tune again without `tuning`."
    elif winner is None:
        head = "No kernel is right: `verdict` has the report of each."
    elif winner.beats:
        head = f"The first is the winner: read kqueue://evaluations/{configurations[0].evaluation_id}/kernel.py."
    elif winner.compared:
        head = "Nothing beats the kernel as given beyond its spread: it is the winner."
    elif winner.config == ORIGINAL:
        head = "No other configuration is known to be right: the winner is the kernel as given."
    else:
        head = "The first is the winner. It was not compared, as the kernel as given is not right."
    lines = [
        " ".join((one.evaluation_id, *(f"{key}={value}" for key, value in one.values.items())))
        + f"{' (as given)' if one.original else ''}: {one.category}"
        + ("" if one.runtime_ms is None else f", {one.runtime_ms:.4g} ms")
        + ("" if one.speedup is None else f", {one.speedup:.3g}x")
        + f", {one.calls} calls{', last comparison' if one.final else ''}"
        for one in configurations
    ]
    told = Tuned(
        tuning=name,
        state="open" if open_ else "done",
        won=winner is not None,
        beats_original=winner is not None and winner.beats,
        configurations=configurations,
        importances={} if open_ else halving.importances(results),
    )
    said = "".join(f"\nImportance of {key}: {share:.2f}" for key, share in told.importances.items())
    return _result(
        f"{head}\n{words.quoted(chr(10).join(lines), 'configurations, with values of the kernel')}{said}", told
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
