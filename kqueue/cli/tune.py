"""`kqueue tune`: find the best values for names in a kernel. `kqueue search` resumes, shows and lists such runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kqueue.cli import options, runs
from kqueue.cli.connection import database
from kqueue.cli.render import milliseconds, print_table, ratio, say, write_json
from kqueue.cli.sources import read_problem, read_source
from kqueue.errors import ConfigError, KqueueError
from kqueue.text import clean

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from kqueue.search.plan import TunePlan
    from kqueue.search.tuning import Configuration, Tuned
    from kqueue.store.searches import Proposal, Run, Step

#: Maximum number of configurations in the printed table.
_ROWS: Final = 40


def tune(
    kernel: Annotated[Path, typer.Argument(metavar="KERNEL", help="File with the kernel.")],
    problem: Annotated[
        str, typer.Option(metavar="FILE", help="The reference, or a stored problem's sha256:HASH.", show_default=False)
    ],
    grid: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=VALUES",
            help="A name in the kernel with values: BLOCK=64,128, BLOCK=16..64..16 or BLOCK=32..512..x2. Repeatable.",
            show_default=False,
        ),
    ],
    trials: Annotated[
        int | None, typer.Option(help="Maximum number of configurations, which Optuna chooses.", show_default="64")
    ] = None,
    finalists: Annotated[
        int | None, typer.Option(help="Number of configurations in the last comparison.", show_default="3")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Number of evaluations of each of them, and of the original.", show_default="5")
    ] = None,
    metric: Annotated[
        str, typer.Option(help="inverse_runtime, speedup, bandwidth or module:function.")
    ] = "inverse_runtime",
    backend: options.Backend = None,
    gpu: Annotated[str, typer.Option(help="A GPU's model such as L40S, or any, auto, cpu.")] = "auto",
    url: runs.Url = None,
    precision: options.Precision = None,
    checks: options.Checks = None,
    calls: Annotated[
        int | None,
        typer.Option("--calls", help="Number of timed calls in the last comparison. Earlier ones use fewer."),
    ] = None,
    settings: options.SettingsTree = None,
    assignments: options.Assignments = None,
    run_name: Annotated[str | None, typer.Option(help="The run's name.", show_default="from the problem's")] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the winner and the pictures.", show_default="tune-NAME"),
    ] = None,
    verbose: runs.Verbose = False,
    as_json: runs.Json = False,
) -> None:
    """Find the best values for constants, macros, launch keywords and constructor arguments of a kernel.

    Exits with 1 if no correct kernel was found.
    """
    from kqueue.integrations.lanes import lane_of
    from kqueue.judging import guess_backend
    from kqueue.search.plan import make_tune_plan
    from kqueue.store import searches
    from kqueue.tuning import space

    source = read_source(kernel)
    given = {"trials": trials, "finalists": finalists, "repeats": repeats}
    name = None if run_name is None else runs.checked(run_name)
    plan = make_tune_plan(
        {
            **read_problem(problem),
            "kernel": source,
            "backend": guess_backend(source) if backend is None else backend,
            "lane": lane_of(gpu),
            "settings": options.settings_of(
                settings, assignments or (), precision=precision, checks=checks, calls=calls, no_timing=False
            ),
            "metrics": [metric],
            "url": url,
            "grid": space.parse(grid),
            **{name: value for name, value in given.items() if value is not None},
        }
    )
    with database("tune") as engine, ExitStack() as stack:
        ready = _Ready(plan, stack)
        run = searches.create(
            engine, name or runs.named(plan.problem_label, plan.algorithm), plan.model_dump(mode="json")
        )
        _carry_out(engine, run, ready, out=out, verbose=verbose, as_json=as_json)


def resume(engine: Engine, run: Run, plan: TunePlan, *, out: Path | None, verbose: bool, as_json: bool) -> None:
    """Resume a run."""
    with ExitStack() as stack:
        _carry_out(engine, run, _Ready(plan, stack), out=out, verbose=verbose, as_json=as_json)


def show(plan: TunePlan, proposals: Sequence[Proposal], *, done: bool) -> None:
    """Print the results of a run, with the winner if it is ``done``."""
    from kqueue.search import tuning

    tuned = tuning.found(plan, proposals, done=done)
    _print_configurations(tuned, plan)
    if not done:
        return
    typer.echo(clean(_summary(tuned)))
    importances = _importances(plan, proposals)
    shares = ", ".join(f"{name} {share:.2f}" for name, share in importances.items())
    typer.echo(
        clean(f"importance: {shares or 'unknown, because there are too few correct configurations or equal scores'}")
    )


def line(one: Proposal) -> str:
    """Return a proposal of a tuning run in one line."""
    try:
        answer = json.loads(one.answer or "")
        values = " ".join(f"{name}={value}" for name, value in answer["values"].items())
        description = f"{values}{' (original)' if answer['given'] else ''}, {answer['calls']} calls"
    except (ValueError, KeyError, TypeError, AttributeError):
        description = "unreadable"
    return f"{description}: {runs.outcome(one)}"


def files_of(
    folder: Path, run: Run, plan: TunePlan, steps: Sequence[Step], proposals: Sequence[Proposal], *, done: bool
) -> list[Path]:
    """Write the files of a run: the winner, the curve, the importances. Report missing pictures."""
    from kqueue.search import tuning
    from kqueue.search.results import draw, draw_importances, write_best

    best = tuning.found(plan, proposals, done=done).best
    files = write_best(folder, [] if best is None else [best])
    try:
        files += draw(folder, {run.name: (plan, proposals, steps)})
        if shares := _importances(plan, proposals):
            files += draw_importances(folder, run, shares)
    except ConfigError as error:
        # The run is over and its kernel written. Only a picture is missing.
        say(error)
    return files


# Running -----------------------------------------------------------------------------------------------


class _Ready:
    """The prerequisites of a plan, which are checked before the run is recorded."""

    def __init__(self, plan: TunePlan, stack: ExitStack) -> None:
        from kqueue.search.metrics import metrics_of
        from kqueue.tuning.halving import load_optuna

        load_optuna()
        self.plan = plan
        self.metrics = metrics_of(plan.metrics, timed=plan.settings.timing.enabled)
        self.client = runs.client_of(plan.url)
        stack.callback(self.client.close)


def _carry_out(engine: Engine, run: Run, ready: _Ready, *, out: Path | None, verbose: bool, as_json: bool) -> None:
    from kqueue.search import tuning
    from kqueue.store import searches

    plan = ready.plan
    with runs.Progress(run, line, steps=None, verbose=verbose) as watcher:
        try:
            proposals = tuning.tune(engine, ready.client, run, plan, ready.metrics, [watcher])
        except (KqueueError, KeyboardInterrupt):
            runs.say_how_to_go_on(run, runs.to_repeat(plan))
            raise
    files = files_of(out or Path(f"tune-{run.name}"), run, plan, searches.steps(engine, run.id), proposals, done=True)
    tuned = tuning.found(plan, proposals, done=True)
    if as_json:
        write_json(_record(run, plan, proposals, tuned, files))
    else:
        show(plan, proposals, done=True)
        for file in files:
            typer.echo(clean(file))
    if tuned.winner is None:
        raise typer.Exit(1)


def _importances(plan: TunePlan, proposals: Sequence[Proposal]) -> dict[str, float]:
    """Return the importances. If Optuna is not installed, report that and return none."""
    from kqueue.search import tuning

    try:
        return tuning.importances(plan, proposals)
    except ConfigError as error:
        say(error)
        return {}


# Output ------------------------------------------------------------------------------------------------


def _record(
    run: Run, plan: TunePlan, proposals: Sequence[Proposal], tuned: Tuned, files: Sequence[Path]
) -> dict[str, Any]:
    original, winner = _original(tuned), tuned.winner
    return {
        "name": run.name,
        "id": run.id,
        "winner": winner
        and {
            "values": tuned.configurations[0].values,
            "beats_original": winner.beats,
            "compared": winner.compared,
            "gain": _gain(tuned.configurations[0], original),
        },
        "configurations": [
            {
                "values": one.values,
                "original": one.original,
                "calls": one.standing.calls,
                "final": one.standing.final,
                "gain": _gain(one, original),
                "category": one.category,
                "runtime_ms": one.middle.runtime_ms,
                "speedup": one.middle.speedup,
                "scores": [row.scores for row in one.rows],
                "proposals": [row.number for row in one.rows],
            }
            for one in tuned.configurations
        ],
        "importances": _importances(plan, proposals),
        "judged": sum(one.category is not None for one in proposals),
        "files": [str(file) for file in files],
    }


def _print_configurations(tuned: Tuned, plan: TunePlan) -> None:
    original = _original(tuned)

    def cells(one: Configuration) -> tuple[object, ...]:
        won = tuned.winner is not None and one.standing.config == tuned.winner.config
        notes = [note for note, holds in (("winner", won), ("original", one.original)) if holds]
        gain = _gain(one, original)
        return (
            *one.values.values(),
            one.standing.calls,
            len(one.rows),
            one.category,
            _times(one),
            ratio(one.middle.speedup),
            "" if gain is None else f"{gain:.3g}x",
            ", ".join(notes),
        )

    names = [name for name, _ in plan.grid]
    head = (*names, "calls", "n", "verdict", "runtime ms", "speedup", "of original", "")
    print_table(head, map(cells, tuned.configurations[:_ROWS]))
    if len(tuned.configurations) > _ROWS:
        typer.echo(f"and {len(tuned.configurations) - _ROWS} more, which are not better. --json has all of them")


def _summary(tuned: Tuned) -> str:
    """Return a sentence on the winner."""
    winner, original = tuned.winner, _original(tuned)
    if winner is None:
        return "no correct kernel was found"
    best = tuned.configurations[0]
    values = " ".join(f"{name}={value}" for name, value in best.values.items())
    if not winner.compared and best.original:
        return f"no other configuration is known to be correct: the winner is the original kernel ({values})"
    if not winner.compared:
        why = "" if original is None or original.standing.right else f", which ended as {original.category}"
        return f"winner: {values}, {_times(best)} ms. It was not compared with the original kernel{why}"
    assert original is not None
    if not winner.beats:
        return f"no configuration beats the original kernel ({values}, {_times(original)} ms) beyond its spread"
    gain = _gain(best, original)
    by = "" if gain is None else f", {gain:.3g}x"
    return f"winner: {values}, {_times(best)} ms{by}, compared with {_times(original)} ms of the original kernel"


def _original(tuned: Tuned) -> Configuration | None:
    return next((one for one in tuned.configurations if one.original), None)


def _gain(one: Configuration, original: Configuration | None) -> float | None:
    """Return the ratio of a configuration's score to the original's, if both were in the last comparison."""
    if original is None or not (one.standing.final and original.standing.final):
        return None
    mine, its = one.score, original.score
    return None if mine is None or its is None or its <= 0 else mine / its


def _times(one: Configuration) -> str:
    """Return the median time in ms, with the shortest and longest if there are several."""
    times = [row.runtime_ms for row in one.rows if row.runtime_ms is not None]
    middle = milliseconds(one.middle.runtime_ms)
    return f"{middle} ({milliseconds(min(times))} to {milliseconds(max(times))})" if len(times) > 1 else middle
