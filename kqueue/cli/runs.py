"""Shared parts of `kqueue search` and `kqueue tune`: options, clients, progress, and proposals as text."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kqueue.cli.render import make_bar, say, text
from kqueue.errors import ConfigError, InvalidRequest, KqueueError
from kqueue.figures import milliseconds, ratio
from kqueue.text import clean, short

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from kqueue.features.duel.duels import Duel
    from kqueue.search.plan import AnyPlan
    from kqueue.search.tuning import Tuned
    from kqueue.store.searches import Proposal, Run, Step
    from kqueue.tuning.tournament import Place

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
    """A recorded search or tuning run."""

    run: Run
    state: str
    plan: AnyPlan
    steps: Sequence[Step]
    proposals: Sequence[Proposal]

    @cached_property
    def tuned(self) -> Tuned | None:
        """The results of a tuning run, with the winner if it is done. None for a search."""
        from kqueue.search.plan import TunePlan
        from kqueue.search.tuning import found

        done = self.state == "done"
        return found(self.plan, self.proposals, self.steps, done=done) if isinstance(self.plan, TunePlan) else None

    @cached_property
    def best(self) -> Sequence[Proposal]:
        """The best proposals. For a tuning run without a winner, the best one of the last step."""
        from kqueue.search.run import best_of, settled
        from kqueue.search.tuning import latest_of

        if places := self.places:
            return [self.proposals[latest_of(self.proposals, one.kernel)] for one in places]
        if self.tuned is None:
            rejected = self.duel is not None and self.duel.winner != "b"
            return self.proposals[:1] if rejected else best_of(settled(self.proposals, self.steps))
        numbers = {step.best for step in self.steps[-1:]} if self.tuned.best is None else {self.tuned.best.number}
        return [one for one in self.proposals if one.number in numbers]

    @cached_property
    def places(self) -> Sequence[Place]:
        """The best kernels of a tournament. Empty for other runs."""
        from kqueue.search.plan import TournamentPlan
        from kqueue.search.tuning import results_of

        if not isinstance(self.plan, TournamentPlan):
            return []
        return self.plan.tournament().places(results_of(self.plan, self.proposals))

    @property
    def duel(self) -> Duel | None:
        """The duel of the start (A) with the best kernel (B), or None."""
        from kqueue.search.run import fought

        return fought(self.steps)

    def show_duel(self) -> None:
        """Print the result of the duel, if there was one."""
        if (duel := self.duel) is not None:
            ends = "the best is confirmed" if duel.winner == "b" else "not confirmed, so the start wins"
            typer.echo(clean(f"duel {duel.id} of the start (A) with the best (B): {ends}. {duel.message}"))

    @cached_property
    def importances(self) -> Mapping[str, float]:
        """The importances of a tuning run's names. If Optuna is not installed, that is reported, and there are none."""
        from kqueue.search.plan import TunePlan
        from kqueue.search.tuning import importances

        try:
            return importances(self.plan, self.proposals) if isinstance(self.plan, TunePlan) else {}
        except ConfigError as error:
            say(error)
            return {}

    def write(self, folder: Path) -> list[Path]:
        """Write the best kernels, the curve, and the importances. Report missing pictures."""
        from kqueue import charts
        from kqueue.search.results import curve, draw, write_best

        best = self.best if self.tuned is None else [self.tuned.best] if self.tuned.best is not None else []
        files = write_best(folder, best)
        try:
            files += draw(folder, "curve", curve({self.run.name: (self.plan, self.proposals, self.steps)}))
            if self.importances:
                files += draw(folder, "importance", charts.Importances(self.run.name, self.importances))
        except ConfigError as error:
            # The run is over and its kernel written. Only a picture is missing.
            say(error)
        return files


def carry_out(engine: Engine, plan: AnyPlan, run: Run | str, *, verbose: bool) -> Record:
    """Complete a run. A text is the name of a new one, which is recorded when all prerequisites are met."""
    from kqueue.client import connect
    from kqueue.search.plan import Plan, TunePlan
    from kqueue.search.population import metrics_of
    from kqueue.search.proposers import make_proposer
    from kqueue.search.results import WandbWatcher, load_wandb
    from kqueue.search.run import Search
    from kqueue.search.tuning import TournamentRun, Tuning
    from kqueue.store import searches
    from kqueue.tuning.halving import load_optuna

    runner: Callable[..., Search | Tuning | TournamentRun] = TournamentRun
    with ExitStack() as stack:
        metrics = metrics_of(plan.metrics, timed=plan.settings.timing.enabled)
        if isinstance(plan, TunePlan):
            load_optuna()
            runner = Tuning
        if isinstance(plan, Plan):
            proposer = make_proposer(plan)
            stack.callback(proposer.close)
            runner = partial(Search, proposer=proposer)
            if plan.use_wandb:
                load_wandb()
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
            command = shlex.join(["kqueue", "search", "resume", run.name, *to_repeat(plan)])
            # `say` would collapse white space, which matters within a command's quotes.
            typer.echo(f"kqueue: the search is recorded. Resume it with: {clean(command)}", err=True)
            raise
    return Record(run, "done", plan, searches.steps(engine, run.id), proposals)


def to_repeat(plan: AnyPlan) -> list[str]:
    """Return the options that must be repeated to resume a run.

    Any user who can search can change the record of any run. The run's plan can make this process execute a command,
    import a function, read a folder, or send secrets to a fleet or to a model, whose name can be an address.
    """
    from kqueue.search.plan import Plan

    options: list[str] = []
    if isinstance(plan, Plan):
        options += [{"model": "--model", "command": "--proposer", "recorded": "--recorded"}[plan.proposer], plan.given]
    if plan.url is not None:
        options += ["--url", plan.url]
    for metric in plan.metrics:
        if ":" in metric:
            options += ["--metric", metric]
    return options


class Progress:
    """A bar on a terminal, and a line for each reported step."""

    def __init__(self, run: Run, plan: AnyPlan, *, verbose: bool) -> None:
        from kqueue.search.plan import Plan

        self._line = line_of(run)
        # The number of steps of a tuning run or a tournament is unknown.
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


def line_of(run: Run) -> Callable[[Proposal], str]:
    """Return the function that formats a run's proposal in one line."""
    return _tuned_line if run.plan.get("algorithm") in {"tune", "tournament"} else _line


def _line(one: Proposal) -> str:
    made = "the start" if one.parent is None else f"step {one.step}, from {one.parent}"
    return f"proposal {one.number} ({made}): {_outcome(one)}"


def _tuned_line(one: Proposal) -> str:
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
