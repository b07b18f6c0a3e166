"""Find the best three of many kernels for a problem within a budget of exclusive device seconds.

All kernels are first judged with few timed calls, as far as half of the budget allows. The best third of the correct
ones is judged again with three times the calls, and so on. Then the best few are judged in rounds, once each in a
round, and every pair of them fights a duel on the values of these rounds. A kernel that has lost three duels leaves. At
the end the best three are judged in full, with all checks and calls.

Every choice depends only on the results so far, so a tournament can be resumed from them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import fmean, median_low
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from kqueue.categories import Category
from kqueue.contract import BackendName, Request, Verdict
from kqueue.features.duel.duels import MOST, Duel, Trial, state
from kqueue.features.search.plan import Config, Entry, Result, Task, promoted, ranked, rungs_of
from kqueue.features.search.run import DEVICE, Batches, answer_of, entry_of, results_of
from kqueue.store.searches import Proposal, Step

#: Maximum number of kernels in a tournament.
MOST_KERNELS: Final = 500
#: Number of kernels that are found.
PLACES: Final = 3
#: Number of kernels in the duels.
_FINALISTS: Final = 8
#: The number of the repetition that stands for an evaluation in full.
FULL: Final = -1
_RUNGS: Final = 3
#: Number of kernels that are judged for the first time at once, after which the costs are known better.
_BATCH: Final = 32
#: Number of timed calls that take as long as the other exclusive work of an evaluation.
_FIXED: Final = 20
#: Part by which two kernels can differ and still count as equal.
_EQUAL: Final = 0.01


@dataclass(frozen=True, slots=True)
class Quote:
    """The price of a tournament, estimated from the results so far.

    Attributes:
        coarse_s: device seconds of one evaluation with few calls.
        kernels: number of kernels that are judged.
        least_s: device seconds of the smallest tournament.
        device_s: device seconds of the whole tournament, at most.
    """

    coarse_s: float
    kernels: int
    least_s: float
    device_s: float


@dataclass(frozen=True, slots=True)
class Place:
    """One of the best kernels.

    Attributes:
        kernel: its index.
        score: the median of its scores in the duels, or before them.
        full: True if it passed in full. False before the end of the tournament.
        lead: the duel of the next best kernel (A) with it (B). None without a next one.
    """

    kernel: int
    score: float
    full: bool
    lead: Duel | None


@dataclass(frozen=True, slots=True)
class Tournament:
    """The plan of a tournament.

    Attributes:
        kernels: number of different kernels.
        calls: maximum number of timed calls of an evaluation in full.
        budget_s: exclusive device seconds. A part is reserved for the evaluations in full. As costs are estimated, the
            last stage can exceed the budget.
    """

    kernels: int
    calls: int
    budget_s: float

    def next(self, results: Sequence[Result]) -> list[Entry] | None:
        """Return the next batch, or None if the tournament is over. ``results`` are complete. Scores are speedups."""
        rungs = self._rungs()[:-1]
        last = results[-1].entry if results else Entry((), rungs[0])
        if last.repeat == FULL:
            return self._in_full(results)
        if last.repeat:
            return self._round(results) or self._in_full(results)
        at_it = {one.entry.config for one in results if one.entry.calls == last.calls}
        if last.calls == rungs[0]:
            # The first correct kernel shows the price.
            most = _BATCH if any(one.right for one in results) else 1
            if new := self._order()[len(at_it) :][: min(most, self._fitting(results, rungs[0]))]:
                return [Entry(one, rungs[0]) for one in new]
        best = ranked(one for one in results if one.entry.config in at_it)
        if last.calls != rungs[-1] and len(best) > _FINALISTS:
            calls = rungs[rungs.index(last.calls) + 1]
            kept = promoted(best, _FINALISTS)[: max(PLACES, self._fitting(results, calls))]
            return [Entry(one, calls) for one in kept]
        fits = max(PLACES, self._fitting(results, rungs[-1], part=1))
        return [Entry(one, rungs[-1], 1) for one in best[: min(_FINALISTS, fits)]] or None

    def quote(self, results: Sequence[Result]) -> Quote | None:
        """Return the estimated price, or None while no kernel has passed."""
        if not any(one.right for one in results):
            return None
        *_, rounds, full = self._rungs()
        first = self._cost(results, self._rungs()[0])
        kernels = min(self.kernels, len(results) + self._fitting(results, self._rungs()[0]))
        rounds_s, full_s = self._cost(results, rounds), PLACES * self._cost(results, full)
        least = sum(one.device_s for one in results) + PLACES * (2 * first + rounds_s) + full_s
        most = 2 * kernels * first + MOST * _FINALISTS * rounds_s + full_s
        return Quote(first, kernels, least, max(least, min(self.budget_s, most)))

    def places(self, results: Sequence[Result]) -> list[Place]:
        """Return the best kernels so far, the best first."""
        finals = [one for one in results if one.entry.repeat > 0]
        full: dict[Config, list[Result]] = {}
        for one in results:
            if one.entry.repeat == FULL:
                full.setdefault(one.entry.config, []).append(one)
        # Two results that a machine failed to give end the attempts.
        failed = {
            one
            for one, mine in full.items()
            if not any(each.right for each in mine) and (len(mine) > 1 or mine[0].score is not None)
        }
        best = [one for one in (self._standing(finals) if finals else ranked(results)) if one not in failed]
        leads = [self._duel(finals, after, one) if finals else None for one, after in pairwise(best)]
        among = finals or results
        scores = [[each.score for each in among if each.entry.config == one and each.score is not None] for one in best]
        places = zip(best, scores, [*leads, None], strict=False)
        return [
            Place(int(one[0]), median_low(mine), any(each.right for each in full.get(one, ())), lead)
            for one, mine, lead in places
        ][:PLACES]

    def _in_full(self, results: Sequence[Result]) -> list[Entry] | None:
        """Return the best kernels that were not judged in full."""
        due = [(str(one.kernel),) for one in self.places(results) if not one.full]
        return [Entry(one, self.calls, FULL) for one in due] or None

    def _round(self, results: Sequence[Result]) -> list[Entry] | None:
        """Return the next round of the duels, or None if they are decided."""
        finals = [one for one in results if one.entry.repeat]
        number = finals[-1].entry.repeat
        standing = self._standing(finals)
        here = {one.entry.config for one in finals if one.entry.repeat == number}
        alive = [
            one
            for one in standing
            if one in here and sum(self._duel(finals, one, other).winner == "b" for other in standing) < PLACES
        ]
        top = standing[: PLACES + 1]
        decided = all(self._duel(finals, after, one).reason is not None for one, after in pairwise(top))
        cost = self._cost(results, finals[-1].entry.calls) * len(alive)
        if len(alive) < 2 or decided or number >= MOST or cost > self._left(results):
            return None
        return [Entry(one, finals[-1].entry.calls, number + 1) for one in alive]

    @staticmethod
    def _standing(finals: Sequence[Result]) -> list[Config]:
        """Return the finalists that passed each time: those with the most rounds first, then by median score."""
        rounds = Counter(one.entry.config for one in finals)
        return sorted(ranked(finals), key=lambda one: -rounds[one])

    @staticmethod
    def _duel(finals: Sequence[Result], a: Config, b: Config) -> Duel:
        """Return the duel of two kernels on the rounds in which both were judged."""
        rounds: dict[int, dict[Config, Trial]] = {}
        for one in finals:
            category = Category.PASSED if one.right or one.score is None else Category.WRONG_VALUES
            rounds.setdefault(one.entry.repeat, {})[one.entry.config] = Trial(category, one.score, ("any", True), None)
        return state([(of[a], of[b]) for _, of in sorted(rounds.items()) if a in of and b in of], within=_EQUAL)

    def _rungs(self) -> list[int]:
        """Return the numbers of timed calls on the rungs, the last of which the duels have too, and in full."""
        rungs = rungs_of(self.calls, _RUNGS)
        return rungs if len(rungs) > 1 else rungs * 2

    def _order(self) -> list[Config]:
        """Return all kernels in an order that is independent of their names."""
        order: list[Config] = [(str(index),) for index in range(self.kernels)]
        random.Random(self.kernels).shuffle(order)  # noqa: S311 no secret
        return order

    def _fitting(self, results: Sequence[Result], calls: int, part: float = 0.5) -> int:
        """Return the number of evaluations that fit into a part of the rest of the budget."""
        cost = self._cost(results, calls)
        # All first evaluations share the same part, in whatever batches they are.
        spent = sum(one.device_s for one in results) if calls == self._rungs()[0] else 0.0
        return max(0, int((part * (self._left(results) + spent) - spent) / cost)) if cost else self.kernels

    def _left(self, results: Sequence[Result]) -> float:
        """Return the rest of the budget, without the price of the evaluations in full."""
        return self.budget_s - sum(one.device_s for one in results) - PLACES * self._cost(results, self.calls)

    @staticmethod
    def _cost(results: Sequence[Result], calls: int) -> float:
        """Return the estimated device seconds of an evaluation, from the last results. 0 if nothing is known."""
        last = results[-1].entry.calls if results else 0
        # A wrong kernel costs less, and gets no further evaluation.
        known = [one.device_s for one in results if one.entry.calls == last and (one.right or calls == last)]
        return fmean(known) * (_FIXED + calls) / (_FIXED + last) if known else 0.0


class TournamentPlan(Task):
    """The plan of a tournament . The best kernels are judged with its settings."""

    algorithm: Literal["tournament"] = "tournament"
    metrics: Annotated[tuple[str, ...], Field(min_length=1, max_length=1)] = ("speedup",)
    candidates: Annotated[tuple[tuple[str, BackendName, str], ...], Field(min_length=1, max_length=MOST_KERNELS)]
    """Label, backend and source of each kernel. The sources differ."""
    gpu_seconds: Annotated[float, Field(gt=0, le=1e6)] = 60.0
    """Seconds of exclusive use of a device."""

    def tournament(self) -> Tournament:
        """Return the steps of the run."""
        return Tournament(len(self.candidates), self.settings.timing.calls, self.gpu_seconds)

    def evaluation(self, entry: Entry) -> Request:
        """Return the request for an entry: with one check, or in full."""
        label, backend, kernel = self.candidates[int(entry.config[0])]
        timing = self.settings.timing.model_copy(update={"calls": entry.calls})
        coarse = {} if entry.repeat == FULL else {"checks": 1}
        settings = self.settings.model_copy(update={"timing": timing, **coarse})
        return self.request(kernel, backend=backend, kernel_label=label, settings=settings)


class TournamentRun(Batches[TournamentPlan]):
    """A tournament. See :class:`~kqueue.features.search.run.Runner`."""

    @cached_property
    def _tournament(self) -> Tournament:
        return self.plan.tournament()

    def _results(self) -> list[Result]:
        return results_of(self.plan, self.proposals.values())

    def _planned(self, number: int) -> tuple[list[dict[str, Any]], None]:  # noqa: ARG002 the results decide
        def columns(number: int, entry: Entry) -> dict[str, Any]:
            index = int(entry.config[0])
            label, _, kernel = self.plan.candidates[index]
            answer = answer_of(entry, {"kernel": label}, index=index)
            return {"number": number, "parent": None, "answer": answer, "kernel": kernel}

        entries = self._tournament.next(self._results()) or ()
        return [columns(number, entry) for number, entry in enumerate(entries, len(self.proposals))], None

    def _conclusion(self, step: Step) -> dict[str, Any]:  # noqa: ARG002 the results decide
        places = self._tournament.places(self._results())
        return {"best": latest_of(self.proposals.values(), places[0].kernel) if places else None}

    def _finalists(self, steps: Mapping[int, Step]) -> None:
        """Return None, because the tournament itself consists of duels."""

    def _scores(self, verdict: Verdict) -> dict[str, float] | None:
        scores = super()._scores(verdict)
        return scores and scores | {DEVICE: verdict.device_s * (verdict.reused_from is None)}

    def _evaluation(self, number: int, attempt: int) -> Request:
        entry = entry_of(self.proposals[number])
        return self._request(self.plan.evaluation(entry), str(number), attempt, fresh=entry.repeat != 0)


def latest_of(proposals: Iterable[Proposal], kernel: int) -> int:
    """Return the number of the last proposal of a kernel of a tournament."""
    return max(one.number for one in proposals if entry_of(one).config == (str(kernel),))
