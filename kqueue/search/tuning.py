"""Tuning runs and tournaments on a fleet. They judge and record the evaluations that :mod:`kqueue.tuning` requests.

Each step is a batch. A proposal is one evaluation of one configuration, or of one kernel of a tournament. Its
``answer`` names it with the number of timed calls, as JSON, and its ``kernel`` is the source. In a tournament, its
scores have the device seconds too. A step is planned in one transaction. The rest depends only on the record, so any
process can resume the run (see :mod:`kqueue.search.run`).
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeVar

from kqueue.client import Ticket, wire
from kqueue.contract import Request, Verdict
from kqueue.errors import InvalidRequest, KqueueError
from kqueue.search.plan import Task, TournamentPlan, TunePlan
from kqueue.search.population import scores_of
from kqueue.search.run import Runner, fought, is_to_be_judged_again
from kqueue.store.searches import Proposal, Step
from kqueue.tuning.halving import Entry, Halving, Result, Standing, Winner, ranked
from kqueue.tuning.space import ORIGINAL
from kqueue.tuning.tournament import Tournament

_PlanT = TypeVar("_PlanT", bound=Task)
#: Name of the device seconds among the scores.
_DEVICE: Final = "device_s"


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
    """Return the results of a run, without a winner unless it is ``done``."""
    halving, results = plan.halving(), results_of(plan, proposals)
    judged = [one for one in proposals if one.ended_at is not None]
    duel = fought(steps)
    winner = halving.winner(results, duel and duel.winner == "b") if done else None
    configurations = [
        Configuration(one, halving.space.shown(one.config), [judged[index] for index in one.places], judged[one.middle])
        for one in halving.standings(results, winner)
    ]
    return Tuned(configurations, winner)


def importances(plan: TunePlan, proposals: Sequence[Proposal]) -> dict[str, float]:
    """Return the importance of each name. See :meth:`~kqueue.tuning.halving.Halving.importances`."""
    return plan.halving().importances(results_of(plan, proposals))


def _answer(entry: Entry, values: Mapping[str, str], **more: int) -> str:
    given = entry.config == ORIGINAL
    answer = {"calls": entry.calls, "repeat": entry.repeat, "given": given, "values": values}
    return json.dumps(answer | more, ensure_ascii=False)


def _entry(proposal: Proposal) -> Entry:
    """Parse a proposal's answer. The kernel of a tournament is named by its index."""
    try:
        answer: dict[str, Any] = json.loads(proposal.answer or "")
        values = [int(answer["index"])] if "index" in answer else [] if answer["given"] else answer["values"].values()
        return Entry(tuple(map(str, values)), int(answer["calls"]), int(answer["repeat"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InvalidRequest(f"proposal {proposal.number} belongs to no tuning run or tournament") from None


def results_of(plan: TunePlan | TournamentPlan, proposals: Iterable[Proposal]) -> list[Result]:
    """Return the results of a run's ended proposals."""
    return [_result(plan, one) for one in proposals if one.ended_at is not None]


def _result(plan: TunePlan | TournamentPlan, proposal: Proposal) -> Result:
    scores = proposal.scores or {}
    return Result(
        _entry(proposal), proposal.category == "passed", scores.get(plan.metrics[0]), scores.get(_DEVICE, 0.0)
    )


class Batches(Runner[_PlanT]):
    """A run whose steps are batches of evaluations. If it fails, it cancels its open evaluations."""

    @abstractmethod
    def _evaluation(self, number: int, attempt: int) -> Request:
        """Return the request for a proposal."""

    def _scores(self, verdict: Verdict) -> dict[str, float] | None:
        """Return a verdict's scores, or None if they are unknown."""
        return scores_of(self.metrics, verdict)

    def _needed(self, proposal: Proposal) -> str | None:  # noqa: ARG002 most runs continue
        """Return the kernel's name if the run cannot continue without its score."""
        return None

    def _work(self, step: Step, mine: Sequence[Proposal]) -> None:  # noqa: ARG002 the proposals suffice
        attempts = {one.number: 0 for one in mine if one.ended_at is None}
        while attempts:
            requests = {number: self._evaluation(number, attempt) for number, attempt in attempts.items()}
            again: dict[int, int] = {}
            tickets: dict[Ticket, int] = {}
            try:
                numbers = list(requests)
                for chunk in wire.chunks(requests.values()):
                    mine_now, numbers = numbers[: len(chunk)], numbers[len(chunk) :]
                    self._submit(dict(zip(mine_now, chunk, strict=True)), tickets)
                for ticket, verdict in self.client.as_completed(list(tickets)):
                    number = tickets.pop(ticket)
                    scores = self._scores(verdict)
                    attempt = attempts[number]
                    if is_to_be_judged_again(verdict, scores, created=ticket.created, attempt=attempt):
                        again[number] = attempt + 1
                    else:
                        proposal = self.proposals[number]
                        self._note(self._record(proposal, verdict, scores, needed=self._needed(proposal)), mine)
            except BaseException:
                with suppress(KqueueError):
                    for ticket in tickets:
                        ticket.cancel()
                raise
            attempts = again

    def _submit(self, requests: Mapping[int, Request], tickets: dict[Ticket, int]) -> None:
        """Submit requests by their numbers. ``tickets`` receives all accepted ones, even if an exception is raised."""

        def submit() -> list[Ticket | InvalidRequest]:
            results = self.client.submit_each(requests.values())
            for number, one in zip(requests, results, strict=True):
                if not isinstance(one, InvalidRequest):
                    tickets[one] = number
            return results

        try:
            results = submit()
        except KeyboardInterrupt:
            # They could have been accepted before it. Their keys find them again.
            with suppress(KqueueError):
                submit()
            raise
        for one in results:
            if isinstance(one, InvalidRequest):
                raise one


class Tuning(Batches[TunePlan]):
    """A tuning run. See :class:`~kqueue.search.run.Runner`."""

    def _needed(self, proposal: Proposal) -> str | None:
        return "the original kernel" if _entry(proposal).config == ORIGINAL else None

    @cached_property
    def _halving(self) -> Halving:
        return self.plan.halving()

    def _planned(self, number: int) -> tuple[list[dict[str, Any]], None]:  # noqa: ARG002 the results decide
        space = self._halving.space
        last = {_entry(one).config: one.number for one in self.proposals.values()}
        planned = [
            {
                "number": number,
                "parent": last.get(entry.config, 0 if number else None),
                "answer": _answer(entry, space.shown(entry.config)),
                "kernel": space.source(entry.config),
            }
            for number, entry in enumerate(self._halving.next(self._results()) or (), len(self.proposals))
        ]
        return planned, None

    def _results(self, step: Step | None = None) -> list[Result]:
        return [_result(self.plan, one) for one in self.proposals.values() if step is None or one.step == step.number]

    def _conclusion(self, step: Step) -> dict[str, Any]:
        # Until the last comparison, the best is chosen within the step, because steps differ in their calls.
        mine = {_entry(one).config: one.number for one in self.proposals.values() if one.step == step.number}
        results = self._results(step)
        winner = self._halving.winner(self._results()) if any(one.entry.repeat for one in results) else None
        best = [winner.config] if winner is not None else [*ranked(results), *mine]
        return {"best": next(mine[one] for one in best if one in mine)}

    def _finalists(self, steps: Mapping[int, Step]) -> tuple[Proposal, Proposal] | None:
        challenger = self._halving.challenger(self._results())
        if challenger is None:
            return None
        last = {_entry(one).config: one for one in self.proposals.values() if one.step == max(steps)}
        return last[ORIGINAL], last[challenger]

    def _evaluation(self, number: int, attempt: int) -> Request:
        proposal, settings = self.proposals[number], self.plan.settings
        entry = _entry(proposal)
        timing = settings.timing.model_copy(update={"calls": entry.calls})
        request = self.plan.request(
            proposal.kernel or "",
            kernel_label=f"{self.run.name}-{number}",
            settings=settings.model_copy(update={"timing": timing}),
        )
        return self._request(request, str(number), attempt, fresh=entry.repeat > 0)


class TournamentRun(Batches[TournamentPlan]):
    """A tournament. See :class:`~kqueue.search.run.Runner`."""

    @cached_property
    def _tournament(self) -> Tournament:
        return self.plan.tournament()

    def _results(self) -> list[Result]:
        return results_of(self.plan, self.proposals.values())

    def _planned(self, number: int) -> tuple[list[dict[str, Any]], None]:  # noqa: ARG002 the results decide
        def columns(number: int, entry: Entry) -> dict[str, Any]:
            index = int(entry.config[0])
            label, _, kernel = self.plan.candidates[index]
            answer = _answer(entry, {"kernel": label}, index=index)
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
        return scores and scores | {_DEVICE: verdict.device_s * (verdict.reused_from is None)}

    def _evaluation(self, number: int, attempt: int) -> Request:
        entry = _entry(self.proposals[number])
        return self._request(self.plan.evaluation(entry), str(number), attempt, fresh=entry.repeat != 0)


def latest_of(proposals: Iterable[Proposal], kernel: int) -> int:
    """Return the number of the last proposal of a kernel of a tournament."""
    return max(one.number for one in proposals if _entry(one).config == (str(kernel),))
