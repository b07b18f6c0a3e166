"""A tuning run. It judges and records the evaluations that :mod:`kqueue.tuning` requests, one batch in each step.

A proposal is one evaluation of one configuration. Its ``answer`` is the configuration with the number of timed calls,
as JSON, and its ``kernel`` the source. A step is planned in one transaction. The rest depends only on the record, so
any process can resume the run (see :mod:`kqueue.search.run`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine

from kqueue.client import Client, Ticket, wire
from kqueue.contract import Request, Verdict
from kqueue.errors import InvalidRequest, KqueueError
from kqueue.feedback import describe
from kqueue.search.judging import asked, columns, is_to_be_asked_again, recorded, without_score
from kqueue.search.metrics import Metric, scores_of
from kqueue.search.plan import TunePlan
from kqueue.search.run import Watcher
from kqueue.store import searches
from kqueue.store.searches import Proposal, Run, Step
from kqueue.tuning.halving import Entry, Result, Standing, Winner, ranked
from kqueue.tuning.space import ORIGINAL


def tune(
    engine: Engine,
    client: Client,
    run: Run,
    plan: TunePlan,
    metrics: Mapping[str, Metric],
    watchers: Sequence[Watcher] = (),
) -> list[Proposal]:
    """Run a tuning run to its end, starting from its recorded state. Return all proposals.

    The run can always be resumed. Evaluations whose verdicts are no longer needed are cancelled.

    Args:
        client: judges kernels, perhaps on another fleet.
        metrics: the one score by its name.
        watchers: receivers of progress.

    Raises:
        ConfigError: Optuna is not installed.
        InvalidRequest: another process runs it, a metric's function failed, or no worker serves the lane.
        EvaluationFailed: the original kernel has no score, for example because the fleet or the problem failed.
        ServiceError: a service failed.
    """
    with recorded(engine, run, plan):
        return _Tuning(engine, client, run, plan, metrics, watchers).to_the_end()


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
        """The median score, or None if there is none."""
        return _score(self.middle)


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


def found(plan: TunePlan, proposals: Sequence[Proposal], *, done: bool) -> Tuned:
    """Return the results of a run.

    Args:
        done: True if the run is complete. Before that there is no winner.

    Raises:
        InvalidRequest: a proposal's record cannot be read.
    """
    halving = plan.halving()
    judged = [one for one in proposals if one.ended_at is not None]
    results = [_result(plan, one) for one in judged]
    winner = halving.winner(results) if done else None
    configurations = [
        Configuration(one, halving.space.shown(one.config), [judged[index] for index in one.places], judged[one.middle])
        for one in halving.standings(results, winner)
    ]
    return Tuned(configurations, winner)


def importances(plan: TunePlan, proposals: Sequence[Proposal]) -> dict[str, float]:
    """Return the importance of each name. See :meth:`~kqueue.tuning.halving.Halving.importances`."""
    return plan.halving().importances([_result(plan, one) for one in proposals if one.ended_at is not None])


def _score(proposal: Proposal) -> float | None:
    # A tuning run has one metric.
    return next(iter((proposal.scores or {}).values()), None)


def _answer(entry: Entry, values: Mapping[str, str]) -> str:
    given = entry.config == ORIGINAL
    answer = {"calls": entry.calls, "repeat": entry.repeat, "given": given, "values": values}
    return json.dumps(answer, ensure_ascii=False)


def _entry(proposal: Proposal) -> Entry:
    """Parse a proposal's answer."""
    try:
        answer: dict[str, Any] = json.loads(proposal.answer or "")
        config = ORIGINAL if answer["given"] else tuple(str(value) for value in answer["values"].values())
        return Entry(config, int(answer["calls"]), int(answer["repeat"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InvalidRequest(f"proposal {proposal.number} does not belong to a tuning run") from None


def _result(plan: TunePlan, proposal: Proposal) -> Result:
    score = (proposal.scores or {}).get(plan.metrics[0])
    return Result(_entry(proposal), proposal.category == "passed", score)


class _Tuning:
    def __init__(
        self,
        engine: Engine,
        client: Client,
        run: Run,
        plan: TunePlan,
        metrics: Mapping[str, Metric],
        watchers: Sequence[Watcher],
    ) -> None:
        self._engine = engine
        self._client = client
        self._run = run
        self._plan = plan
        self._halving = plan.halving()
        self._metrics = metrics
        self._watchers = watchers
        self._steps = {step.number: step for step in searches.steps(engine, run.id)}
        self._proposals = {one.number: one for one in searches.proposals(engine, run.id)}

    def to_the_end(self) -> list[Proposal]:
        number = 0
        while True:
            step = self._steps.get(number) or self._begin(number)
            if step is None:
                return list(self._proposals.values())
            if step.ended_at is None:
                self._steps[number] = step
                self._judge([one for one in self._proposals.values() if one.step == number])
                self._end(step)
            number += 1

    def _begin(self, number: int) -> Step | None:
        """Plan a step. Return None if the run is complete."""
        batch = self._halving.next(self._results())
        if batch is None:
            return None
        space = self._halving.space
        last = {_entry(one).config: one.number for one in self._proposals.values()}
        planned = [
            {
                "number": number_planned,
                "parent": last.get(entry.config, 0 if number_planned else None),
                "answer": _answer(entry, space.shown(entry.config)),
                "kernel": space.source(entry.config),
            }
            for number_planned, entry in enumerate(batch, len(self._proposals))
        ]
        step, made = searches.begin_step(self._engine, self._run.id, number, planned, None)
        self._proposals |= {one.number: one for one in made}
        return step

    def _results(self) -> list[Result]:
        return [_result(self._plan, one) for one in self._proposals.values()]

    def _end(self, step: Step) -> None:
        # Until the last comparison, the best is chosen within the step, because steps differ in their calls.
        mine = {_entry(one).config: one.number for one in self._proposals.values() if one.step == step.number}
        results = [_result(self._plan, one) for one in self._proposals.values() if one.step == step.number]
        winner = self._halving.winner(self._results()) if any(one.entry.repeat for one in results) else None
        best = [winner.config] if winner is not None else [*ranked(results), *mine]
        ended = searches.update_step(
            self._engine, self._run.id, step.number, ended=True, best=next(mine[one] for one in best if one in mine)
        )
        self._steps[step.number] = ended
        for watcher in self._watchers:
            watcher.step(ended, self._proposals)

    # Judging ---------------------------------------------------------------------------------------------------

    def _judge(self, mine: Sequence[Proposal]) -> None:
        """Judge all open proposals of a step concurrently."""
        attempts = {one.number: 0 for one in mine if one.ended_at is None}
        while attempts:
            requests = {number: self._request(number, attempt) for number, attempt in attempts.items()}
            again: dict[int, int] = {}
            tickets: dict[Ticket, int] = {}
            try:
                numbers = list(requests)
                for chunk in wire.chunks(requests.values()):
                    mine_now, numbers = numbers[: len(chunk)], numbers[len(chunk) :]
                    self._submit(dict(zip(mine_now, chunk, strict=True)), tickets)
                for ticket, verdict in self._client.as_completed(list(tickets)):
                    number = tickets.pop(ticket)
                    scores = scores_of(self._metrics, verdict)
                    attempt = attempts[number]
                    if is_to_be_asked_again(verdict, scores, created=ticket.created, attempt=attempt):
                        again[number] = attempt + 1
                    else:
                        self._note(number, verdict, scores, mine)
            except BaseException:
                with suppress(KqueueError):
                    self._cancel(tickets)
                raise
            attempts = again

    def _submit(self, requests: Mapping[int, Request], tickets: dict[Ticket, int]) -> None:
        """Submit requests by their numbers. ``tickets`` receives all accepted ones, even if an exception is raised."""

        def submit() -> list[Ticket | InvalidRequest]:
            results = self._client.submit_each(requests.values())
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

    def _cancel(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            ticket.cancel()

    def _request(self, number: int, attempt: int) -> Request:
        proposal, settings = self._proposals[number], self._plan.settings
        entry = _entry(proposal)
        timing = settings.timing.model_copy(update={"calls": entry.calls})
        request = self._plan.request(
            proposal.kernel or "",
            kernel_label=f"{self._run.name}-{number}",
            settings=settings.model_copy(update={"timing": timing}),
        )
        return asked(request, self._run, str(number), attempt, fresh=entry.repeat > 0)

    def _note(
        self, number: int, verdict: Verdict, scores: Mapping[str, float] | None, mine: Sequence[Proposal]
    ) -> None:
        proposal = self._proposals[number]
        if scores is None and _entry(proposal).config == ORIGINAL:
            # The run needs it for comparison. It stays open, so that a resumed run judges it again.
            raise without_score(verdict, "the original kernel", self._metrics)
        self._proposals[number] = ended = searches.ended(
            self._engine,
            self._run.id,
            number,
            evaluation_id=verdict.evaluation_id,
            scores=scores,
            feedback=describe(verdict, proposal.kernel or ""),
            **columns(verdict),
        )
        done = sum(self._proposals[one.number].ended_at is not None for one in mine)
        for watcher in self._watchers:
            watcher.proposal(ended, done, len(mine))
