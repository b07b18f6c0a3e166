"""The tool `tune`: values for names in a kernel, judged as evaluations of one batch."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, TypeVar, TypeVarTuple

import anyio
import anyio.to_thread
from mcp_types import CallToolResult
from pydantic import BaseModel, Field

from kqueue.contract import Request, Verdict, parse_request
from kqueue.features.duel.duels import Duel, Match
from kqueue.features.search.plan import ORIGINAL, Entry, Result
from kqueue.features.tune.halving import FINALISTS, REPEATS, Halving, Winner, unknown
from kqueue.features.tune.space import Space, from_values
from kqueue.integrations.common import scorer
from kqueue.mcp.connection import Call, caller_of
from kqueue.mcp.evaluations import submit, verdicts
from kqueue.mcp.rendering import quoted
from kqueue.mcp.schemas import MOST, MOST_ROWS, KernelSource, Language, Submission, Timeout, flat, result, with_advice

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

#: Number of tunings that compute at a time, because their CPU-bound work would block other requests.
_TUNING: Final = anyio.CapacityLimiter(1)


@dataclass(frozen=True, kw_only=True)
class Tuning(Submission):
    """The arguments of `tune`."""

    kernel: KernelSource
    backend: Language
    grid: Annotated[
        dict[str, list[int | float | bool | str]],
        Field(
            description='Names in the kernel with the values to try, such as {"BLOCK": [64, 128, 256]}: constants of '
            "the module, #define in strings, keywords of Triton launches (`num_warps`), defaults of "
            "`ModelNew.__init__`. If several of these have the same name, use `constant:BLOCK`, `macro:BLOCK`, "
            "`launch:BLOCK` or `argument:BLOCK`."
        ),
    ]
    trials: Annotated[int, Field(ge=1, le=MOST, description="Maximum number of configurations to judge.")] = 32
    finalists: Annotated[int, Field(ge=1, le=10, description="Configurations in the last comparison.")] = FINALISTS
    repeats: Annotated[int, Field(ge=2, le=10, description="Evaluations of each finalist.")] = REPEATS
    tuning: Annotated[
        str | None,
        Field(
            pattern="^[0-9a-f]{16}$",
            description="Id from an earlier answer, to continue that tuning with the same arguments.",
        ),
    ] = None
    timeout_s: Timeout = 45.0


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
    configurations: Annotated[list[Tried], Field(description=f"The best first, at most {MOST_ROWS}.")]
    importances: Annotated[dict[str, float], Field(description="Importance of each name. The sum is 1. Can be empty.")]


@with_advice
@flat
async def tune(call: Call, arguments: Tuning) -> Annotated[CallToolResult, Tuned]:
    """Find the best values for names in a kernel: judge all or some configurations, and the best ones repeatedly.

    Wrong kernels drop out. The last comparison judges the best few configurations and the original kernel under equal
    conditions. The original kernel wins unless the best one wins a duel with it. If the time runs out,
    call again with `tuning` and the same arguments: nothing is judged twice.
    """
    began, caller = time.monotonic(), caller_of(call)
    name = arguments.tuning or secrets.token_hex(8)
    own = {"kernel": arguments.kernel, "backend": arguments.backend, "batch": f"tune-{name}"}
    first = parse_request(arguments.shared() | own)
    space = await _in_turn(Space, first.kernel, from_values(arguments.grid))
    score = scorer("inverse_runtime")
    halving = Halving(space, first.settings.timing.calls, arguments.trials, arguments.finalists, arguments.repeats)
    results: list[Result] = []
    judged: list[Verdict] = []
    while (batch := await _in_turn(halving.next, results)) is not None:
        keys = [f"tune/{name}/{index}" for index, _ in enumerate(batch, len(results))]
        ids = await submit(caller, await _in_turn(_due, first, space, batch, keys))
        what = f"{batch[0].calls} calls{', the last comparison' if batch[0].repeat else ''}: "
        came = await verdicts(call, caller, ids, arguments.timeout_s, began=began, what=what)
        done = [(entry, came[identity]) for entry, identity in zip(batch, ids, strict=True) if identity in came]
        judged += [one for _, one in done]
        results += [Result(entry, one.passed, score(one)) for entry, one in done]
        if len(came) < len(ids):
            open_ = f"No winner yet. {what}{len(came)} of {len(ids)} judged. The rest continues: call `tune` again."
            return await _in_turn(_tuned, name, halving, results, judged, None, open_)
    state = None
    if (challenger := halving.challenger(results)) is not None:
        best = first.model_copy(update={"kernel": space.source(challenger)})
        match, fought = Match.of(first, best, key=f"tune/{name}/{best.kernel_hash}"), list[Verdict]()
        while (state := match.state(fought)).reason is None:
            ids = await submit(caller, match.requests(len(fought) // 2, state.due))
            came = await verdicts(call, caller, ids, arguments.timeout_s, began=began, what="duel with the original: ")
            if len(came) < len(ids):
                open_ = "No winner yet. The best and the original fight a duel, which continues: call `tune` again."
                return await _in_turn(_tuned, name, halving, results, judged, None, open_)
            fought += [came[identity] for identity in ids]
    return await _in_turn(_tuned, name, halving, results, judged, state, None)


async def _in_turn(work: Callable[[*_Ts], _T], *args: *_Ts) -> _T:
    """Run ``work`` in a thread, one tuning at a time, and return its result."""
    return await anyio.to_thread.run_sync(work, *args, limiter=_TUNING)


def _due(first: Request, space: Space, batch: Sequence[Entry], keys: Sequence[str]) -> list[Request]:
    """Return the requests for a batch of a tuning."""
    settings, timing = first.settings, first.settings.timing
    return [
        first.model_copy(
            update={
                "kernel": space.source(entry.config),
                "settings": settings.model_copy(update={"timing": timing.model_copy(update={"calls": entry.calls})}),
                "idempotency_key": key,
                "reuse": entry.repeat == 0,
            }
        )
        for entry, key in zip(batch, keys, strict=True)
    ]


def _tuned(
    name: str,
    halving: Halving,
    results: Sequence[Result],
    judged: Sequence[Verdict],
    duel: Duel | None,
    open_: str | None,
) -> CallToolResult:
    """Return the result of a tuning. ``open_`` is its progress in words, or None if it is done."""
    winner = None if open_ else halving.winner(results, duel and duel.winner == "b")
    configurations: list[Tried] = []
    for one in halving.standings(results, winner)[:MOST_ROWS]:
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
    head = f"{open_} Give tuning={name}." if open_ else _outcome(results, winner, configurations)
    head += f"\nDuel of the original (A) with the best (B): {duel.message}" if duel else ""
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
    return result(f"{head}\n{quoted(chr(10).join(lines), 'configurations, with values of the kernel')}{shares}", tuned)


def _outcome(results: Sequence[Result], winner: Winner | None, configurations: Sequence[Tried]) -> str:
    """Return the outcome of a tuning that is done, in one line."""
    if unknown(results):
        return "No winner: the original kernel was not judged. See its `verdict`, and tune again without `tuning`."
    if winner is None:
        return "No kernel is right: `verdict` returns the report of each."
    if winner.beats:
        return f"The first is the winner: read kqueue://evaluations/{configurations[0].evaluation_id}/kernel.py."
    if winner.compared:
        return "No configuration beats the original kernel reliably: the original is the winner."
    if winner.config == ORIGINAL:
        return "No other configuration is known to be right: the original kernel is the winner."
    return "The first is the winner. It was not compared, because the original kernel is not right."
