"""Tuning runs on a fleet, and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field

from kqueue.contract import Request
from kqueue.features.search.plan import ORIGINAL, Result, Task, ranked
from kqueue.features.search.run import Batches, answer_of, entry_of, fought, result_of, results_of
from kqueue.features.tune.halving import FINALISTS, MOST_TRIALS, REPEATS, TRIALS, Halving, Standing, Winner, load_optuna
from kqueue.features.tune.space import Parameter, Space
from kqueue.store.searches import Proposal, Step


class TunePlan(Task):
    """The plan of a tuning run (:mod:`kqueue.features.tune`). The last comparison uses its settings' timed calls."""

    algorithm: Literal["tune"] = "tune"
    metrics: Annotated[tuple[str, ...], Field(min_length=1, max_length=1)] = ("inverse_runtime",)
    grid: Annotated[tuple[Parameter, ...], Field(min_length=1)]
    """Names of the kernel, each with its values to try."""
    trials: Annotated[int, Field(ge=1, le=MOST_TRIALS)] = TRIALS
    """Maximum number of judged configurations, not counting the original kernel."""
    finalists: Annotated[int, Field(ge=1, le=100)] = FINALISTS
    """Number of configurations in the last comparison."""
    repeats: Annotated[int, Field(ge=2, le=50)] = REPEATS
    """Number of evaluations of each finalist."""

    def check(self) -> None:
        self.halving()

    def require(self) -> None:
        load_optuna()

    def halving(self) -> Halving:
        """Return the steps of the run, or raise InvalidRequest if the kernel cannot have such values."""
        return Halving(
            Space(self.kernel, self.grid), self.settings.timing.calls, self.trials, self.finalists, self.repeats
        )


@dataclass(frozen=True, slots=True)
class Configuration:
    """The results of a configuration.

    Attributes:
        standing: the furthest stage that it reached.
        rows: its ended proposals of that stage.
        middle: the proposal with the median score. Of two middle ones, the worse.
    """

    standing: Standing
    values: Mapping[str, str]
    rows: Sequence[Proposal]
    middle: Proposal

    @property
    def original(self) -> bool:
        """True if it is the original kernel."""
        return self.standing.config == ORIGINAL

    @property
    def category(self) -> str:
        """The category of the first proposal that did not pass, or ``passed``."""
        return next((str(row.category) for row in self.rows if row.category != "passed"), "passed")

    @property
    def score(self) -> float | None:
        """The median score of the one metric, or None if there is none."""
        return next(iter((self.middle.scores or {}).values()), None)


@dataclass(frozen=True, slots=True)
class Tuned:
    """The results of a tuning run so far.

    Attributes:
        configurations: all judged configurations, the winner first, then by stage and score.
        winner: the winner, or None while it is unknown or if no kernel passed.
    """

    configurations: Sequence[Configuration]
    winner: Winner | None

    @property
    def best(self) -> Proposal | None:
        """The winner's proposal, or None without a winner."""
        return None if self.winner is None else self.configurations[0].middle


def found(plan: TunePlan, proposals: Sequence[Proposal], steps: Sequence[Step], *, done: bool) -> Tuned:
    """Return the results of a run, with the winner if it is ``done``. Raise InvalidRequest for a wrong record."""
    halving, results = plan.halving(), results_of(plan, proposals)
    judged = [one for one in proposals if one.ended_at is not None]
    duel = fought(steps)
    winner = halving.winner(results, duel and duel.winner == "b") if done else None
    configurations = [
        Configuration(one, halving.space.shown(one.config), [judged[index] for index in one.places], judged[one.middle])
        for one in halving.standings(results, winner)
    ]
    return Tuned(configurations, winner)


class Tuning(Batches[TunePlan]):
    """A tuning run. See :class:`~kqueue.features.search.run.Runner`."""

    def _needed(self, proposal: Proposal) -> str | None:
        return "the original kernel" if entry_of(proposal).config == ORIGINAL else None

    @cached_property
    def _halving(self) -> Halving:
        return self.plan.halving()

    def _planned(self, number: int) -> tuple[list[dict[str, Any]], None]:  # noqa: ARG002 the results decide
        space = self._halving.space
        last = {entry_of(one).config: one.number for one in self.proposals.values()}
        planned = [
            {
                "number": number,
                "parent": last.get(entry.config, 0 if number else None),
                "answer": answer_of(entry, space.shown(entry.config)),
                "kernel": space.source(entry.config),
            }
            for number, entry in enumerate(self._halving.next(self._results()) or (), len(self.proposals))
        ]
        return planned, None

    def _results(self, step: Step | None = None) -> list[Result]:
        return [result_of(self.plan, one) for one in self.proposals.values() if step is None or one.step == step.number]

    def _conclusion(self, step: Step) -> dict[str, Any]:
        # Until the last comparison, the best is chosen within the step, because steps differ in their calls.
        mine = {entry_of(one).config: one.number for one in self.proposals.values() if one.step == step.number}
        results = self._results(step)
        winner = self._halving.winner(self._results()) if any(one.entry.repeat for one in results) else None
        best = [winner.config] if winner is not None else [*ranked(results), *mine]
        return {"best": next(mine[one] for one in best if one in mine)}

    def _finalists(self, steps: Mapping[int, Step]) -> tuple[Proposal, Proposal] | None:
        challenger = self._halving.challenger(self._results())
        if challenger is None:
            return None
        last = {entry_of(one).config: one for one in self.proposals.values() if one.step == max(steps)}
        return last[ORIGINAL], last[challenger]

    def _evaluation(self, number: int, attempt: int) -> Request:
        proposal, settings = self.proposals[number], self.plan.settings
        entry = entry_of(proposal)
        timing = settings.timing.model_copy(update={"calls": entry.calls})
        request = self.plan.request(
            proposal.kernel or "",
            kernel_label=f"{self.run.name}-{number}",
            settings=settings.model_copy(update={"timing": timing}),
        )
        return self._request(request, str(number), attempt, fresh=entry.repeat > 0)
