"""Shared parts of the commands on runs: options, clients, progress, records, and proposals as text."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from kqueue.cli.render import make_bar, print_table, say, text, write_json
from kqueue.errors import ConfigError, InvalidRequest, KqueueError
from kqueue.figures import milliseconds, ratio
from kqueue.registry import features
from kqueue.text import clean, short

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from kqueue import charts
    from kqueue.features.duel.duels import Duel
    from kqueue.features.search.plan import Task
    from kqueue.store.searches import Proposal, Run, Step

Json = Annotated[bool, typer.Option("--json", help="Print JSON lines.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Print each verdict's feedback to stderr.")]


def checked(name: str) -> str:
    """Return a run's name if it is valid."""
    from kqueue.store.models import SEARCH_NAME

    if not re.fullmatch(SEARCH_NAME, name):
        raise InvalidRequest(f"--run-name {name!r}: use up to 100 letters, digits and . _ + -, a letter or digit first")
    return name


def named(label: str | None, algorithm: str) -> str:
    """Return a new name for a run of the problem with this label."""
    from uuid import uuid4

    stem = re.sub(r"[^A-Za-z0-9._+-]", "-", label or "").lstrip("._+-")[:60] or "search"
    return f"{stem}-{algorithm}-{uuid4().hex[:6]}"


@dataclass(frozen=True)
class Record:
    """A recorded search. Features derive the records of other runs from it.

    Attributes:
        plan_type, engine: the classes of its plan and of its runner.
        proposer, folder: the origin of the kernels if the plan does not name it, the beginning of its folder's name.
    """

    plan_type: ClassVar = "kqueue.features.search.plan:Plan"
    engine: ClassVar = "kqueue.features.search.run:Search"
    proposer: ClassVar = ""
    folder: ClassVar = "search"
    run: Run
    state: str
    plan: Any
    steps: Sequence[Step]
    proposals: Sequence[Proposal]

    @staticmethod
    def line(one: Proposal) -> str:
        """Return a proposal in one line."""
        made = "the start" if one.parent is None else f"step {one.step}, from {one.parent}"
        return f"proposal {one.number} ({made}): {_outcome(one)}"

    @cached_property
    def best(self) -> Sequence[Proposal]:
        """The best proposals."""
        from kqueue.features.search.run import best_of, settled

        rejected = self.duel is not None and self.duel.winner != "b"
        return self.proposals[:1] if rejected else best_of(settled(self.proposals, self.steps))

    @property
    def winners(self) -> Sequence[Proposal]:
        """The proposals whose kernels are written."""
        return self.best

    @property
    def duel(self) -> Duel | None:
        """The duel of the start (A) with the best kernel (B), or None."""
        from kqueue.features.search.run import fought

        return fought(self.steps)

    def show_duel(self) -> None:
        """Print the result of the duel, if there was one."""
        if (duel := self.duel) is not None:
            ends = "the best is confirmed" if duel.winner == "b" else "not confirmed, so the start wins"
            typer.echo(clean(f"duel {duel.id} of the start (A) with the best (B): {ends}. {duel.message}"))

    def charts(self) -> dict[str, Callable[[], charts.Chart]]:
        """Return the functions that make its pictures, by the kinds of `kqueue plot`."""
        from kqueue.features.search.results import curve

        return {"curve": lambda: curve({self.run.name: (self.plan, self.proposals, self.steps)})}

    def drawn(self) -> dict[str, Callable[[], charts.Chart]]:
        """Return the ones that are written, by the names of the files."""
        return self.charts()

    def write(self, folder: Path) -> list[Path]:
        """Write the best kernels and the pictures. Report missing pictures."""
        from kqueue.features.search.results import draw, write_best

        files = write_best(folder, self.winners)
        try:
            for name, make in self.drawn().items():
                files += draw(folder, name, make())
        except ConfigError as error:
            # The run is over and its kernel written. Only a picture is missing.
            say(error)
        return files

    def show(self) -> None:
        """Print the results."""
        metrics = list(dict.fromkeys(name for one in self.best for name in one.scores or ()))
        rows = (
            (
                one.number,
                one.step,
                one.parent,
                one.category,
                milliseconds(one.runtime_ms),
                ratio(one.speedup),
                *(f"{(one.scores or {})[name]:.4g}" for name in metrics),
                one.evaluation_id,
            )
            for one in self.best
        )
        print_table(("best", "step", "from", "category", "runtime ms", "speedup", *metrics, "evaluation"), rows)
        self.show_duel()

    def finish(self, out: Path | None, *, as_json: bool) -> None:
        """Write the files of a completed run, and print its results."""
        files = self.write(out or Path(f"{self.folder}-{self.run.name}"))
        if as_json:
            write_json({"name": self.run.name, "id": self.run.id} | self.results() | {"files": list(map(str, files))})
        else:
            self.show()
            for file in files:
                typer.echo(clean(file))
        if not any(one.category == "passed" for one in self.winners):
            raise typer.Exit(1)

    def results(self) -> dict[str, Any]:
        """Return the results that are printed as JSON at the end."""
        return self.summary()

    def summary(self) -> dict[str, Any]:
        """Return the results in JSON."""
        names = ("number", "step", "parent", "category", "runtime_ms", "speedup", "scores", "evaluation_id")
        return {
            "proposals": max(0, len(self.proposals) - 1),
            "judged": sum(one.category is not None for one in self.proposals),
            "passed": sum(one.category == "passed" for one in self.proposals),
            "unknown": sum(one.ended_at is not None and one.scores is None for one in self.proposals),
            "best": [{name: getattr(one, name) for name in names} for one in self.best],
            "duel": self.duel and self.duel.model_dump(mode="json"),
        }


def kind_of(plan: Mapping[str, Any]) -> type[Record]:
    """Return the class of the records of runs with such a plan: a feature's, or the one of searches."""
    kinds = {algorithm: kind for feature in features().values() for algorithm, kind in feature.runs.items()}
    kind = kinds.get(plan.get("algorithm", ""))
    return Record if kind is None else resolve_name(kind)


def carry_out(engine: Engine, plan: Task, run: Run | str, *, verbose: bool) -> Record:
    """Complete a run. A text is the name of a new one, which is recorded when all prerequisites are met."""
    from kqueue.client import connect
    from kqueue.features.search.plan import Plan
    from kqueue.features.search.population import metrics_of
    from kqueue.features.search.proposers import make_proposer
    from kqueue.features.search.results import WandbWatcher
    from kqueue.store import searches

    kind = kind_of(plan.model_dump(include={"algorithm"}))
    with ExitStack() as stack:
        metrics = metrics_of(plan.metrics, timed=plan.settings.timing.enabled)
        plan.require()
        runner = resolve_name(kind.engine)
        if isinstance(plan, Plan):
            proposer = make_proposer(plan)
            stack.callback(proposer.close)
            runner = partial(runner, proposer=proposer)
        client = connect(plan.url)
        stack.callback(client.close)
        if isinstance(run, str):
            run = searches.create(engine, run, plan.model_dump(mode="json"))
        given: dict[str, Any] = {"engine": engine, "client": client, "run": run, "plan": plan, "metrics": metrics}
        watchers: list[Any] = [stack.enter_context(Progress(run, plan, verbose=verbose))]
        if isinstance(plan, Plan) and plan.use_wandb:
            watchers.append(WandbWatcher(run, plan))
            stack.callback(watchers[-1].finish)
        try:
            proposals = runner(**given, watchers=watchers).complete()
        except (KqueueError, KeyboardInterrupt):
            command = shlex.join(["kqueue", "search", "resume", run.name, *plan.to_repeat()])
            # `say` would collapse white space, which matters within a command's quotes.
            typer.echo(f"kqueue: the search is recorded. Resume it with: {clean(command)}", err=True)
            raise
    return kind(run, "done", plan, searches.steps(engine, run.id), proposals)


class Progress:
    """A bar on a terminal, and a line for each reported step."""

    def __init__(self, run: Run, plan: Any, *, verbose: bool) -> None:
        from kqueue.features.search.plan import Plan

        self._line = kind_of(run.plan).line
        # The number of steps of other runs is unknown.
        self._steps, self._every = (plan.num_steps, plan.log_frequency) if isinstance(plan, Plan) else (None, 1)
        self._verbose = verbose
        self._bar = make_bar()
        self._task = self._bar.add_task("steps", total=None if self._steps is None else self._steps + 1)
        self._say(f"search {run.name} ({run.id})")

    def __enter__(self) -> Progress:
        """Show the bar."""
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bar."""
        self._bar.stop()

    def proposal(self, proposal: Proposal, done: int, planned: int) -> None:
        """Report that a proposal ended."""
        description = f"step {proposal.step}: {done}/{planned} judged"
        if self._steps is None:
            self._bar.update(self._task, description=description, completed=done, total=planned)
        else:
            self._bar.update(self._task, description=description)
        if self._verbose:
            self._say(self._line(proposal))
            for line in (proposal.feedback or "").splitlines():
                self._say(f"  {line}", whole=True)

    def step(self, step: Step, proposals: Mapping[int, Proposal]) -> None:
        """Report that a step ended."""
        if self._steps is not None:
            self._bar.update(self._task, completed=step.number + 1)
        if step.number % self._every == 0 or step.number == self._steps:
            best = "none" if step.best is None else self._line(proposals[step.best])
            of = "" if self._steps is None else f"/{self._steps}"
            tested = f", judged once more{scored(step.test['scores'])}" if step.test else ""
            self._say(f"step {step.number}{of}: best is {best}{tested}")

    def duel(self, state: Duel) -> None:
        """Report the state of the duel of the best kernel with the start."""
        self._bar.update(self._task, description=f"duel with the start: {state.rounds}/{state.most} rounds")
        if state.reason is not None:
            self._say(f"duel of the start (A) with the best (B): {state.message}")

    def _say(self, line: str, *, whole: bool = False) -> None:
        self._bar.console.print(clean(line) if whole else text(line), soft_wrap=True)


def batch_line(one: Proposal) -> str:
    """Return a proposal of a run whose steps are batches in one line."""
    try:
        answer = json.loads(one.answer or "")
        values = " ".join(f"{name}={value}" for name, value in answer["values"].items())
        description = f"{values}{' (original)' if answer['given'] else ''}, {answer['calls']} calls"
    except (ValueError, KeyError, TypeError, AttributeError):
        description = "unreadable"
    return f"{description}: {_outcome(one)}"


def _outcome(one: Proposal) -> str:
    """Return the result of a proposal in one line."""
    state = one.category or ("no answer" if one.error else "no kernel" if one.ended_at else "open")
    times = "" if one.runtime_ms is None else f", {milliseconds(one.runtime_ms)} ms {ratio(one.speedup)}".rstrip()
    why = "" if one.category == "passed" else f": {short((one.error or one.message or '').partition(chr(10))[0], 200)}"
    return f"{state}{why}{times}{scored(one.scores)}"


def scored(scores: Mapping[str, float] | None) -> str:
    """Return scores as text, each after a comma."""
    return "".join(f", {name} {score:.4g}" for name, score in (scores or {}).items())
