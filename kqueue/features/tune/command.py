"""`kqueue tune`: the best values for names in a kernel. `kqueue search` resumes, shows and lists such runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kqueue.cli import options
from kqueue.cli.connection import database
from kqueue.cli.render import print_table, say
from kqueue.cli.sources import adapted, read_problem, read_source
from kqueue.errors import ConfigError
from kqueue.features.search import runs
from kqueue.figures import milliseconds, ratio
from kqueue.text import clean

if TYPE_CHECKING:
    from kqueue import charts
    from kqueue.features.tune.run import Configuration, Tuned
    from kqueue.store.searches import Proposal

#: Maximum number of configurations in the printed table.
_ROWS: Final = 40


def tune(
    kernel: Annotated[Path, typer.Argument(metavar="KERNEL", help="File with the kernel.")],
    *,
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
    url: options.Url = None,
    judging: options.Timed,
    run_name: Annotated[str | None, typer.Option(help="The run's name.", show_default="from the problem's")] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the winner and the pictures.", show_default="tune-NAME"),
    ] = None,
    verbose: runs.Verbose = False,
    as_json: runs.Json = False,
) -> None:
    """Find the best values for constants, macros, launch keywords and constructor arguments of a kernel.

    Only the last comparison makes all timed calls. Exits with 1 if no correct kernel was found.
    """
    from kqueue.features.search.plan import make_plan
    from kqueue.features.tune import space
    from kqueue.features.tune.run import TunePlan
    from kqueue.integrations.common import lane_of
    from kqueue.judging import guess_backend

    fields = adapted({**read_problem(problem), "kernel": read_source(kernel)})
    source = fields["kernel"]
    given = {"trials": trials, "finalists": finalists, "repeats": repeats}
    name = None if run_name is None else runs.checked(run_name)
    plan = make_plan(
        TunePlan,
        {
            **fields,
            "backend": guess_backend(source) if backend is None else backend,
            "lane": lane_of(gpu),
            "settings": judging.tree(),
            "metrics": [metric],
            "url": url,
            "grid": space.parse(grid),
            **{name: value for name, value in given.items() if value is not None},
        },
    )
    with database("tune") as engine:
        name = name or runs.named(plan.problem_label, plan.algorithm)
        runs.carry_out(engine, plan, name, verbose=verbose).finish(out, as_json=as_json)


class TuneRecord(runs.Record):
    """A recorded tuning run."""

    plan_type = "kqueue.features.tune.run:TunePlan"
    engine = "kqueue.features.tune.run:Tuning"
    proposer, folder = "Optuna", "tune"
    line = staticmethod(runs.batch_line)

    @cached_property
    def tuned(self) -> Tuned:
        """The results, with the winner if the run is done."""
        from kqueue.features.tune.run import found

        return found(self.plan, self.proposals, self.steps, done=self.state == "done")

    @cached_property
    def best(self) -> Sequence[Proposal]:
        """The winner's proposal. Without a winner, the best one of the last step."""
        numbers = {step.best for step in self.steps[-1:]} if self.tuned.best is None else {self.tuned.best.number}
        return [one for one in self.proposals if one.number in numbers]

    @property
    def winners(self) -> Sequence[Proposal]:
        return [] if self.tuned.best is None else [self.tuned.best]

    @cached_property
    def importances(self) -> Mapping[str, float]:
        """The importances of the names. If Optuna is not installed, that is reported, and there are none."""
        try:
            return self._importances()
        except ConfigError as error:
            say(error)
            return {}

    def charts(self) -> dict[str, Callable[[], charts.Chart]]:
        from kqueue import charts

        return super().charts() | {"importances": lambda: charts.Importances(self.run.name, self._importances())}

    def _importances(self) -> Mapping[str, float]:
        from kqueue.features.search.run import results_of

        return self.plan.halving().importances(results_of(self.plan, self.proposals))

    def drawn(self) -> dict[str, Callable[[], charts.Chart]]:
        *_, importance = self.charts().values()
        return super().charts() | ({"importance": importance} if self.importances else {})

    def results(self) -> dict[str, Any]:
        original, winner = _original(self.tuned), self.tuned.winner
        return {
            "winner": winner
            and {
                "values": self.tuned.configurations[0].values,
                "beats_original": winner.beats,
                "compared": winner.compared,
                "gain": _gain(self.tuned.configurations[0], original),
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
                for one in self.tuned.configurations
            ],
            "duel": self.duel and self.duel.model_dump(mode="json"),
            "importances": self.importances,
            "judged": sum(one.category is not None for one in self.proposals),
        }

    def show(self) -> None:
        _print_configurations(self.tuned, [name for name, _ in self.run.plan["grid"]])
        if self.state != "done":
            return
        typer.echo(clean(_summary(self.tuned)))
        self.show_duel()
        shares = ", ".join(f"{name} {share:.2f}" for name, share in self.importances.items())
        unknown = "unknown, because there are too few correct configurations or equal scores"
        typer.echo(clean(f"importance: {shares or unknown}"))


def _print_configurations(tuned: Tuned, names: Sequence[str]) -> None:
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
        return f"no configuration beats the original kernel ({values}, {_times(original)} ms) reliably"
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
