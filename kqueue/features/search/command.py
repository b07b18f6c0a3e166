"""`kqueue search`: search for a fast kernel, and resume, show, list and compare searches."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from operator import methodcaller
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kqueue.cli import options
from kqueue.cli.connection import Reader, database, on_database, reading
from kqueue.cli.render import first, print_table, say, write_json
from kqueue.cli.sources import read_source
from kqueue.errors import InvalidRequest
from kqueue.features.search import runs
from kqueue.figures import milliseconds, moment, ratio
from kqueue.text import clean

if TYPE_CHECKING:
    from kqueue import charts
    from kqueue.features.search.plan import Task
    from kqueue.store.searches import Proposal, Run

#: Seconds between two polls of a watched run.
_POLL_S: Final = 1.0
#: State shown for a search whose record cannot be read.
_UNREADABLE: Final = "unreadable"

_RunName = Annotated[str, typer.Argument(metavar="RUN", help="The search's name, or the first digits of its id.")]
_ModelName = Annotated[
    str | None, typer.Option(metavar="NAME", help="A model of LiteLLM writes kernels.", show_default=False)
]
_Command = Annotated[
    str | None,
    typer.Option(
        metavar="COMMAND", help="A command writes kernels: JSON on stdin, a kernel on stdout.", show_default=False
    ),
]
_Folder = Annotated[
    Path | None, typer.Option(metavar="DIR", help="The kernels are this folder's *.py, by name.", show_default=False)
]
_Out = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder for the best kernel and the curve.", show_default="search-NAME"),
]


group = typer.Typer()


# Trace's scripts write ``--num_steps``.
@group.callback(
    invoke_without_command=True, context_settings={"token_normalize_func": methodcaller("replace", "_", "-")}
)
@options.with_groups
def search(
    context: typer.Context,
    *,
    problem: Annotated[Path | None, typer.Option(metavar="FILE", help="The reference.", show_default=False)] = None,
    task_idx: Annotated[
        int | None,
        typer.Option(min=0, help="Instead of --problem: the problem's index in the level, from 0.", show_default=False),
    ] = None,
    level: Annotated[int, typer.Option(help="KernelBench's level, for --task-idx.")] = 1,
    kernelbench: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A checkout of KernelBench, for --task-idx.", show_default=False)
    ] = None,
    kernel: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The kernel to start from.", show_default="the reference, in plain torch"),
    ] = None,
    model: _ModelName = None,
    proposer: _Command = None,
    recorded: _Folder = None,
    answer_s: Annotated[float, typer.Option(help="Maximum seconds for one answer.")] = 600.0,
    backend: Annotated[str, typer.Option("--backend", "-b", help="Backend of the kernels, such as triton.")] = "cuda",
    gpu: Annotated[str, typer.Option(help="A GPU's model such as L40S, or any, auto, cpu.")] = "auto",
    url: options.Url = None,
    algorithm: Annotated[str, typer.Option(help="PS, PS_Summarizer, PS_epsNet or PS_epsNet_Summarizer.")] = "PS",
    num_steps: Annotated[int, typer.Option(help="Number of steps.")] = 50,
    num_candidates: Annotated[int, typer.Option(help="Number of kernels that a step makes proposals from.")] = 1,
    num_proposals: Annotated[int, typer.Option(help="Number of proposals from each of them.")] = 1,
    num_threads: Annotated[int, typer.Option(help="Number of proposals that are written and judged at once.")] = 20,
    epsilon: Annotated[
        float, typer.Option(help="For epsNet: the maximum share of differing lines between similar kernels.")
    ] = 0.1,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="inverse_runtime, speedup, bandwidth, correctness or module:function. Repeat it for a Pareto front.",
            show_default="inverse_runtime",
        ),
    ] = None,
    judging: options.Judging,
    log_frequency: Annotated[int, typer.Option(help="Number of steps between two reports.")] = 1,
    test_frequency: Annotated[
        int, typer.Option(help="Number of steps between two tests that judge the best kernel once more. 0: none.")
    ] = 0,
    use_wandb: Annotated[bool, typer.Option("--use-wandb", help="Report to Weights & Biases.")] = False,
    project_name: Annotated[str, typer.Option(help="The Weights & Biases project.")] = "kqueue",
    run_name: Annotated[str | None, typer.Option(help="The search's name.", show_default="from the problem's")] = None,
    out: _Out = None,
    verbose: runs.Verbose = False,
    as_json: runs.Json = False,
) -> None:
    """Search for a fast kernel. Proposals are judged, and new ones are made from the best.

    Options can be written with _ for -. Exits with 1 if no correct kernel was found.
    """
    if context.invoked_subcommand is not None:
        return
    from kqueue.features.search.plan import Plan, make_plan
    from kqueue.integrations.common import lane_of, starting_kernel

    name = None if run_name is None else runs.checked(run_name)
    file = _problem(problem, task_idx, level, kernelbench)
    reference = read_source(file)
    proposers = _proposers(model, proposer, recorded)
    if len(proposers) != 1:
        raise InvalidRequest("--model, --proposer, --recorded: give one of them to write kernels")
    [(who, given)] = proposers
    plan = make_plan(
        Plan,
        {
            "problem": reference,
            "problem_label": file.stem,
            "kernel": starting_kernel(reference if kernel is None else read_source(kernel)),
            "backend": backend,
            "lane": lane_of(gpu),
            "settings": judging.tree(),
            "algorithm": algorithm,
            "num_steps": num_steps,
            "num_candidates": num_candidates,
            "num_proposals": num_proposals,
            "num_threads": num_threads,
            "epsilon": epsilon,
            "metrics": metric or ["inverse_runtime"],
            "proposer": who,
            "given": given,
            "answer_s": answer_s,
            "log_frequency": log_frequency,
            "test_frequency": test_frequency,
            "use_wandb": use_wandb,
            "project_name": project_name,
            "url": url,
        },
    )
    with database("search") as engine:
        name = name or runs.named(file.stem, plan.algorithm)
        runs.carry_out(engine, plan, name, verbose=verbose).finish(out, as_json=as_json)


@group.command()
def resume(
    which: _RunName,
    model: _ModelName = None,
    proposer: _Command = None,
    recorded: _Folder = None,
    url: options.Url = None,
    metric: Annotated[
        list[str] | None, typer.Option(help="The search's module:function. Repeatable.", show_default=False)
    ] = None,
    num_steps: Annotated[int | None, typer.Option(help="Another total number of steps.", show_default=False)] = None,
    num_threads: Annotated[
        int | None, typer.Option(help="Another number of concurrent proposals.", show_default=False)
    ] = None,
    out: _Out = None,
    verbose: runs.Verbose = False,
    as_json: runs.Json = False,
) -> None:
    """Resume a search that was interrupted, or continue one with more steps. Recorded work is not repeated.

    Give the proposer, --url and functions of --metric again unchanged, because other users can change the record.
    """
    from kqueue.features.search.plan import Plan, make_plan
    from kqueue.store import searches

    with database("search") as engine:
        run = searches.find(engine, which)
        changed = {"num_steps": num_steps, "num_threads": num_threads}
        plan = _found(partial(on_database, engine), run).plan
        _check_same(plan, _proposers(model, proposer, recorded), url, metric or ())
        if isinstance(plan, Plan):
            plan = make_plan(Plan, run.plan | {name: value for name, value in changed.items() if value is not None})
        elif any(value is not None for value in changed.values()):
            raise InvalidRequest("--num-steps, --num-threads: only a search has them")
        runs.carry_out(engine, plan, run, verbose=verbose).finish(out, as_json=as_json)


@group.command()
def show(
    which: _RunName,
    proposal: Annotated[
        int | None, typer.Option(help="Show one proposal with its prompt, kernel and feedback.", show_default=False)
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Print proposals as they are judged, until the search ends.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the best kernel and the curve.", show_default=False)
    ] = None,
    as_json: runs.Json = False,
) -> None:
    """Show a search with its steps and best kernels, or one proposal."""
    from kqueue.store import searches

    with reading("search") as read:
        run = read(searches.find, which)
        if watch:
            _watch(read, run)
        record = _found(read, read(searches.find, str(run.id)))
    if proposal is not None:
        _show_proposal(record.run, record.proposals, proposal, as_json=as_json)
    elif as_json:
        steps, proposals = [*map(asdict, record.steps)], [*map(asdict, record.proposals)]
        write_json({**asdict(record.run), "state": record.state, "steps": steps, "proposals": proposals})
    else:
        _show_run(record)
    if out is not None:
        for file in record.write(out):
            typer.echo(clean(file), err=as_json)


@group.command("list")
def list_runs(
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of searches.")] = 20,
    as_json: runs.Json = False,
) -> None:
    """List searches, the latest first."""
    from kqueue.store import searches

    with reading("search") as read:
        rows = _all_found(read, first(read(searches.listing, limit + 1), limit))
    if not as_json:
        _print_runs(rows)
        return
    for one in rows:
        if isinstance(one, runs.Record):
            plan = one.plan.model_dump(mode="json", exclude={"problem", "kernel", "candidates"})
            write_json(asdict(one.run) | {"state": one.state, "plan": plan} | one.summary())
        else:
            write_json(asdict(one) | {"state": _UNREADABLE, "plan": None})


@group.command()
def compare(
    which: Annotated[list[str], typer.Argument(metavar="RUN...", help="Names or ids of searches.")],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Draw all curves in one picture.", show_default=False)
    ] = None,
    as_json: runs.Json = False,
) -> None:
    """Compare searches: their best scores, and after how many proposals they were reached."""
    from kqueue.features.search.results import curve, draw
    from kqueue.store import searches

    with reading("search") as read:
        rows = _all_found(read, {run.id: run for run in (read(searches.find, one) for one in which)}.values())
    readable = [one for one in rows if isinstance(one, runs.Record)]
    if not as_json:
        _print_runs(rows)
    else:
        for one in rows:
            run, state, summary = (
                (one.run, one.state, one.summary()) if isinstance(one, runs.Record) else (one, _UNREADABLE, {})
            )
            write_json({"name": run.name, "id": run.id, "state": state, **summary})
    if out is not None:
        chart = curve({one.run.name: (one.plan, one.proposals, one.steps) for one in readable})
        for file in draw(out, "curve", chart):
            typer.echo(clean(file), err=as_json)


def charts_of(read: Reader, key: str) -> tuple[str, dict[str, Callable[[], charts.Chart]]]:
    """Return a run's name, and the functions that make its pictures, by their kinds."""
    from kqueue.store import searches

    record = _found(read, read(searches.find, key))
    return record.run.name, record.charts()


# Arguments ---------------------------------------------------------------------------------------------


def _problem(problem: Path | None, task_idx: int | None, level: int, kernelbench: Path | None) -> Path:
    if problem is not None:
        if task_idx is not None or kernelbench is not None:
            raise InvalidRequest("--problem: give it, or --task-idx and --kernelbench, not both")
        return problem
    if task_idx is None or kernelbench is None:
        raise InvalidRequest("--problem: give a file, or --task-idx with --level and --kernelbench")
    from kqueue.features.kernelbench.runs import problems_of

    # A KernelBench checkout has its levels in a folder with the same name.
    inner = kernelbench / "KernelBench"
    problems = problems_of(inner if inner.is_dir() else kernelbench, level)
    files = [problems[number][0] for number in sorted(problems)]
    if task_idx >= len(files):
        raise InvalidRequest(f"--task-idx {task_idx}: level {level} in {kernelbench} has {len(files)} problems, from 0")
    return files[task_idx]


def _proposers(model: str | None, proposer: str | None, recorded: Path | None) -> list[tuple[str, str]]:
    given = {"model": model, "command": proposer, "recorded": None if recorded is None else str(recorded.resolve())}
    return [(name, value) for name, value in given.items() if value is not None]


def _check_same(plan: Task, proposers: Sequence[tuple[str, str]], url: str | None, metrics: Sequence[str]) -> None:
    from kqueue.features.search.plan import Plan

    functions = {name for name in plan.metrics if ":" in name}
    if (
        list(proposers) != ([(plan.proposer, plan.given)] if isinstance(plan, Plan) else [])
        or url != plan.url
        or not functions <= set(metrics) <= set(plan.metrics)
    ):
        raise InvalidRequest(
            "repeat the options of the search, because other users can change its record. The record has "
            f"{shlex.join(plan.to_repeat())}"
        )


# Output ------------------------------------------------------------------------------------------------


def _watch(read: Reader, run: Run) -> None:
    """Print proposals as they end, until no process runs the search."""
    from kqueue.states import SearchState
    from kqueue.store import searches

    line = runs.kind_of(run.plan).line
    seen = set[int]()
    while True:
        last = read(searches.find, str(run.id)).state is not SearchState.RUNNING or not read(searches.held, run.id)
        for one in read(searches.proposals, run.id):
            if one.ended_at is not None and one.number not in seen:
                seen.add(one.number)
                typer.echo(clean(line(one)))
        if last:
            return
        time.sleep(_POLL_S)


def _found(read: Reader, run: Run) -> runs.Record:
    """Read a run's record. Raise :class:`InvalidRequest` if it cannot be read."""
    from kqueue.features.search.plan import make_plan
    from kqueue.states import SearchState
    from kqueue.store import searches

    try:
        steps, proposals = read(searches.steps, run.id), read(searches.proposals, run.id)
        gone = run.state is SearchState.RUNNING and not read(searches.held, run.id)
        kind = runs.kind_of(run.plan)
        plan = make_plan(resolve_name(kind.plan_type), run.plan)
        record = kind(run, "interrupted" if gone else str(run.state), plan, steps, proposals)
        assert record.best is not None  # it is computed here, so that an unreadable record is refused
    except (InvalidRequest, ValueError) as error:
        raise InvalidRequest(f"the record of the search {run.name} cannot be read: {error}") from None
    return record


def _all_found(read: Reader, listed: Iterable[Run]) -> list[runs.Record | Run]:
    """Return the records of runs. For an unreadable record return only the run."""
    found: list[runs.Record | Run] = []
    for run in listed:
        try:
            found.append(_found(read, run))
        except InvalidRequest as error:
            say(error)
            found.append(run)
    return found


def _print_runs(rows: Sequence[runs.Record | Run]) -> None:
    def cells(row: runs.Record | Run) -> tuple[object, ...]:
        if not isinstance(row, runs.Record):
            return (row.name, _UNREADABLE, *[None] * (len(head) - 2), moment(row.created_at))
        run, plan, summary = row.run, row.plan, row.summary()
        best = summary["best"][0] if summary["best"] else None
        return (
            run.name,
            row.state,
            plan.problem_label,
            plan.algorithm,
            row.proposer or (plan.given if plan.proposer == "model" else plan.proposer),
            summary["proposals"],
            f"{summary['passed']}/{summary['judged']}",
            None if best is None else best["number"],
            "" if best is None else runs.scored(best["scores"]).removeprefix(", "),
            "" if best is None else milliseconds(best["runtime_ms"]),
            "" if best is None else ratio(best["speedup"]),
            moment(run.created_at),
        )

    head = (
        "name", "state", "problem", "algorithm", "proposer", "n", "passed", "best", "score", "runtime ms", "speedup",
    )  # fmt: skip
    print_table((*head, "created"), (cells(row) for row in rows))


def _show_run(record: runs.Record) -> None:
    _print_runs([record])
    by_step: dict[int, list[Proposal]] = {}
    for one in record.proposals:
        by_step.setdefault(one.step, []).append(one)
    by_number = {one.number: one for one in record.proposals}
    rows = (
        (
            step.number,
            " ".join(map(str, dict.fromkeys(one.parent for one in mine if one.parent is not None))),
            f"{sum(one.ended_at is not None for one in mine)}/{len(mine)}",
            sum(one.category == "passed" for one in mine),
            step.best,
            "" if step.best is None else runs.scored(by_number[step.best].scores).removeprefix(", "),
            runs.scored(step.test["scores"]).removeprefix(", ") if step.test else "",
        )
        for step in record.steps
        if (mine := by_step.get(step.number, []))
    )
    print_table(("step", "from", "judged", "passed", "best", "score", "judged once more"), rows)
    record.show()
    if record.state in {"interrupted", "stopped"}:
        # The options are not printed, because the record could have been changed by another user.
        typer.echo(f"resume it with `kqueue search resume {clean(record.run.name)}` and its original options")


def _show_proposal(run: Run, proposals: Sequence[Proposal], number: int, *, as_json: bool) -> None:
    chosen = next((one for one in proposals if one.number == number), None)
    if chosen is None:
        raise InvalidRequest(f"--proposal {number}: the search has {len(proposals)} proposals, from 0")
    if as_json:
        write_json(asdict(chosen))
        return
    typer.echo(clean(runs.kind_of(run.plan).line(chosen)))
    for title, content in (("prompt", chosen.prompt), ("kernel", chosen.kernel), ("feedback", chosen.feedback)):
        if content:
            typer.echo(f"\n--- {title} ---\n{clean(content.rstrip())}")
