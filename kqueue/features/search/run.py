"""The engine of searches and tuning runs, and the search. Each step is recorded before the next action.

A step is planned (parents and number of proposals), each proposal is written and judged, and the step ends. Everything
is stored in Postgres at once, so a process that resumes the run does only the unrecorded work:

- A step's plan is one transaction.
- An answer is recorded before its kernel is submitted, so a proposer is never asked twice.
- The id of the final duel, and with it the keys of its evaluations, depends only on the run and both kernels.
- An evaluation's idempotency key depends only on the run and the kernel, so a kernel is judged once in a run, whether
  its verdict was recorded or not.
"""

from __future__ import annotations

import itertools
import json
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from statistics import median_low
from typing import Any, Final, Generic, TypeVar

from sqlalchemy import Engine

from kqueue.client import Client, Ticket, wire
from kqueue.contract import Request, Verdict
from kqueue.errors import EvaluationFailed, InvalidRequest, KqueueError, ProposerFailed
from kqueue.features.duel.duels import Duel, Match, duel
from kqueue.features.search.plan import ORIGINAL, Entry, Plan, Result, Task
from kqueue.features.search.population import Candidate, Expansion, Metric, choose, fronts, scores_of
from kqueue.features.search.proposers import Proposer, Question, digest, prompt
from kqueue.feedback import describe
from kqueue.integrations.extraction import take
from kqueue.shapes import public
from kqueue.states import SearchState
from kqueue.store import searches
from kqueue.store.searches import Proposal, Run, Step

_ItemT = TypeVar("_ItemT")
_ResultT = TypeVar("_ResultT")
_PlanT = TypeVar("_PlanT", bound=Task)

#: Name of the device seconds among the scores.
DEVICE: Final = "device_s"
#: Score of a source that is not a kernel, under any metric.
_REFUSED: Final = 0.0
#: Maximum number of evaluations of a correct kernel whose scores stay unknown.
_TRIES: Final = 3


class Watcher:
    """A receiver of progress, called in the thread that runs the search."""

    def proposal(self, proposal: Proposal, done: int, planned: int) -> None:
        """Handle the end of a proposal, after which ``done`` of the step's ``planned`` ones have ended."""

    def step(self, step: Step, proposals: Mapping[int, Proposal]) -> None:
        """Handle the end of a step."""

    def duel(self, state: Duel) -> None:
        """Handle a result in the duel of the best kernel (B) with the start (A)."""


@contextmanager
def recorded(engine: Engine, run: Run, plan: Task) -> Generator[None]:
    """Acquire exclusive use of a run during the block, and record its plan and its final state.

    Raise InvalidRequest if another process runs it, or has run it since ``run`` was read.
    """
    with searches.alone(engine, run.id):
        now = searches.find(engine, str(run.id))
        if now.id != run.id or now.plan != run.plan:
            raise InvalidRequest(f"the plan of the search {run.name} has just changed: check it, and resume it again")
        searches.set_state(engine, run.id, SearchState.RUNNING, plan.model_dump(mode="json"))
        try:
            yield
        except BaseException:
            searches.set_state(engine, run.id, SearchState.STOPPED)
            raise
        searches.set_state(engine, run.id, SearchState.DONE)


@dataclass
class Runner(ABC, Generic[_PlanT]):
    """A search or a tuning run, from its recorded state to its end. The client can judge on another fleet."""

    engine: Engine
    client: Client
    run: Run
    plan: _PlanT
    metrics: Mapping[str, Metric]
    watchers: Sequence[Watcher]
    proposals: dict[int, Proposal] = field(init=False, default_factory=dict[int, Proposal])

    def complete(self) -> list[Proposal]:
        """Run to the end and return all proposals. If this fails, the run can be resumed.

        Raises:
            InvalidRequest: another process runs it, a metric's function failed, or no worker serves the lane.
            EvaluationFailed: the initial kernel has no score, for example because the fleet or the problem failed.
            ProposerFailed: no proposal of a step got an answer.
        """
        with recorded(self.engine, self.run, self.plan):
            steps = {step.number: step for step in searches.steps(self.engine, self.run.id)}
            self.proposals = {one.number: one for one in searches.proposals(self.engine, self.run.id)}
            for number in self._numbers():
                step = steps.get(number) or self._begin(number)
                if step is None:
                    break
                if step.ended_at is None:
                    self._work(step, [one for one in self.proposals.values() if one.step == number])
                    columns = self._conclusion(step)
                    step = searches.update_step(self.engine, self.run.id, step.number, ended=True, **columns)
                    for watcher in self.watchers:
                        watcher.step(step, self.proposals)
                steps[number] = step
            self._confirm(steps)
        return list(self.proposals.values())

    def _confirm(self, steps: Mapping[int, Step]) -> None:
        """Let the best kernel and the start fight a duel, and record it with the last step."""
        pair = self._finalists(steps) if self.plan.duels else None
        if pair is None:
            return
        a, b = (self.plan.request(one.kernel or "", kernel_label=f"{self.run.name}-{one.number}") for one in pair)
        match = Match.of(a, b, key=f"{self.run.id}/{a.kernel_hash}/{b.kernel_hash}")
        last, state = steps[max(steps)], fought([steps[max(steps)]]) or Duel()
        if state.id == match.id:
            return
        for state in duel(self.client.evaluate_batch, match):
            for watcher in self.watchers:
                watcher.duel(state)
        best = pair[state.winner == "b"]
        test = {"number": pair[1].number, "scores": None} | (last.test or {}) | {"duel": state.model_dump(mode="json")}
        searches.update_step(self.engine, self.run.id, last.number, ended=True, best=best.number, test=test)

    def _begin(self, number: int) -> Step | None:
        planned, text = self._planned(number)
        if not planned:
            return None
        step, made = searches.begin_step(self.engine, self.run.id, number, planned, text)
        self.proposals |= {one.number: one for one in made}
        return step

    def _numbers(self) -> Iterable[int]:
        """Return the numbers of the steps."""
        return itertools.count()

    @abstractmethod
    def _planned(self, number: int) -> tuple[Sequence[Mapping[str, Any]], str | None]:
        """Return the columns of a step's proposals, empty if the run is complete, and the text for its summariser."""

    @abstractmethod
    def _work(self, step: Step, mine: Sequence[Proposal]) -> None:
        """Judge all open proposals of a step, and note each as it ends."""

    @abstractmethod
    def _conclusion(self, step: Step) -> dict[str, Any]:
        """Return the columns of a step that are known at its end."""

    @abstractmethod
    def _finalists(self, steps: Mapping[int, Step]) -> tuple[Proposal, Proposal] | None:
        """Return the start and the best kernel after all steps, or None if there is nothing to compare."""

    def _note(self, proposal: Proposal, mine: Sequence[Proposal]) -> None:
        """Replace an ended proposal of the step with the proposals ``mine``, and report it."""
        self.proposals[proposal.number] = proposal
        done = sum(self.proposals[one.number].ended_at is not None for one in mine)
        for watcher in self.watchers:
            watcher.proposal(proposal, done, len(mine))

    def _request(self, request: Request, name: str, attempt: int, *, fresh: bool) -> Request:
        """Return a request under a key that depends on ``name``, which is unique for each kernel in its run.

        The verdict of an equal evaluation is reused, except for ``fresh`` requests and after one without a time.
        """
        key = f"search/{self.run.id}/{name}/{attempt}"
        fields = {"idempotency_key": key, "batch": self.run.name, "reuse": not fresh and attempt == 0}
        return request.model_copy(update=fields)

    def _record(
        self,
        proposal: Proposal,
        verdict: Verdict,
        scores: Mapping[str, float] | None,
        *,
        needed: str | None = None,
        note: str = "",
    ) -> Proposal:
        """Record a proposal's verdict.

        If it has no score and the run cannot continue without the score of the kernel ``needed``, raise
        EvaluationFailed. The proposal stays open, so that a resumed run judges it again.
        """
        if scores is None and needed:
            error = EvaluationFailed(verdict)
            if verdict.judged:
                message = f"--metric {', '.join(self.metrics)}: unknown for {needed}, which ended as {verdict.category}"
                if (why := verdict.evidence.untimed) is not None:
                    ways = f"It was not timed: {why}. Choose a GPU's lane or another metric"
                else:
                    ways = "Choose another metric or lane, or resume when the machine is less busy"
                error.args = (f"{message}. {ways}",)
            raise error
        return searches.ended(
            self.engine,
            self.run.id,
            proposal.number,
            evaluation_id=verdict.evaluation_id,
            scores=scores,
            feedback=describe(verdict, proposal.kernel or "", note=note),
            **_columns(verdict),
        )


def is_to_be_judged_again(verdict: Verdict, scores: Mapping[str, float] | None, *, created: bool, attempt: int) -> bool:
    """Return True if a kernel must be judged once more, after ``attempt`` earlier requests.

    The evaluation of an earlier submission was not ``created``.
    """
    # A correct kernel can lack a time because the machine was busy.
    again = verdict.passed and verdict.evidence.untimed is None and attempt + 1 < _TRIES
    # An earlier evaluation can have no result. The next one has another key.
    return scores is None and (again or not created)


def _columns(verdict: Verdict) -> dict[str, Any]:
    """Return the columns of a proposal that come from its verdict."""
    return {
        "category": str(verdict.category),
        "message": verdict.message,
        "runtime_ms": verdict.runtime_ms,
        "speedup": verdict.speedup,
    }


def fought(steps: Sequence[Step]) -> Duel | None:
    """Return the duel of the start (A) with the best kernel (B) after the last step, or None."""
    found = (steps[-1].test or {}).get("duel") if steps else None
    return None if found is None else Duel.model_validate(found)


def settled(proposals: Iterable[Proposal], steps: Iterable[Step]) -> list[Proposal]:
    """Return proposals with the medians of all scores of their kernels, in proposals and in tests.

    Of an even number of scores the worse of the two in the middle counts.
    """
    ordered = list(proposals)
    kernels = {one.number: one.kernel for one in ordered}
    tests: dict[str | None, list[Mapping[str, float]]] = {}
    for step in steps:
        if step.test and step.test["scores"]:
            tests.setdefault(kernels.get(step.test["number"]), []).append(step.test["scores"])

    def scores(one: Proposal) -> dict[str, float] | None:
        every = [one.scores or {}, *tests.get(one.kernel, ())]
        return one.scores and {name: median_low([each[name] for each in every]) for name in one.scores}

    return [replace(one, scores=scores(one)) for one in ordered]


def best_of(ordered: Sequence[Proposal]) -> list[Proposal]:
    """Return the best proposals, the oldest first. Of several with the same scores return only the oldest."""
    first = next(iter(fronts(_candidates(ordered))), [])
    oldest = {one.scores: one.number for one in reversed(first)}
    return [one for one in ordered if one.number in oldest.values()]


def _candidates(proposals: Sequence[Proposal]) -> list[Candidate]:
    """Return the proposals with known scores."""
    return [
        Candidate(one.number, one.step, one.kernel, tuple(one.scores.values()))
        for one in proposals
        if one.ended_at is not None and one.kernel is not None and one.scores is not None
    ]


def _expansions(proposals: Sequence[Proposal]) -> list[Expansion]:
    """Return the expansions so far, in the order of steps."""
    first: dict[str | None, int] = {}
    for one in proposals:
        first.setdefault(one.kernel, one.number)
    made: dict[tuple[int, int], bool] = {}
    for one in proposals:
        if one.parent is not None:
            key = (one.step, one.parent)
            made[key] = made.get(key, False) or one.kernel is None or first[one.kernel] == one.number
    return [Expansion(parent, step, new) for (step, parent), new in made.items()]


@dataclass
class Search(Runner[Plan]):
    """A search. See :class:`Runner`."""

    proposer: Proposer

    def _settled(self, steps: Iterable[Step] | None = None) -> list[Proposal]:
        return settled(self.proposals.values(), searches.steps(self.engine, self.run.id) if steps is None else steps)

    def _finalists(self, steps: Mapping[int, Step]) -> tuple[Proposal, Proposal] | None:
        best = next(iter(best_of(self._settled(steps.values()))), None)
        start = self.proposals[0]
        if best is None or best.number == 0 or (start.category, best.category) != ("passed", "passed"):
            return None
        return start, best

    def _numbers(self) -> Iterable[int]:
        return range(self.plan.num_steps + 1)

    def _planned(self, number: int) -> tuple[list[dict[str, Any]], str | None]:
        plan = self.plan
        if number == 0:
            return [{"number": 0, "parent": None, "kernel": plan.kernel, "answer": ""}], None
        proposals = self._settled()
        chosen = choose(
            plan.algorithm, _candidates(proposals), _expansions(proposals), plan.num_candidates, plan.epsilon
        )
        parents = [one.number for one in chosen for _ in range(plan.num_proposals)]
        first, most = max(self.proposals) + 1, self.proposer.most
        # A proposer can have no further kernels.
        planned = [
            {"number": new, "parent": parent}
            for new, parent in enumerate(parents, first)
            if most is None or new <= most
        ]
        return planned, digest(proposals) if plan.algorithm.summarizes else None

    def _work(self, step: Step, mine: Sequence[Proposal]) -> None:
        if step.digest is not None and step.summary is None:
            summary = self.proposer.summarize(public(self.plan.problem), step.digest)
            step = searches.update_step(self.engine, self.run.id, step.number, summary=summary)
        waiting = [one for one in mine if one.ended_at is None]
        failed = list[tuple[Proposal, ProposerFailed]]()
        for one, result in _in_threads(lambda one: self._proposal(step, one), waiting, self.plan.num_threads):
            try:
                self._note(result.result(), mine)
            except ProposerFailed as error:
                failed.append((one, error))
        if failed and len(failed) == len(mine):
            raise failed[0][1]
        for one, error in failed:
            self._note(searches.ended(self.engine, self.run.id, one.number, error=str(error)), mine)

    def _conclusion(self, step: Step) -> dict[str, Any]:
        best = next(iter(best_of(self._settled())), None)
        if best is None:
            return {"best": None}
        every = self.plan.test_frequency
        due = every and step.number and step.number % every == 0
        return {"best": best.number} | ({"test": self._test(step, best)} if due else {})

    # Code that runs in threads ----------------------------------------------------------------------------

    def _proposal(self, step: Step, proposal: Proposal) -> Proposal:
        if proposal.answer is None:
            question = self._question(step, proposal)
            answer = self.proposer.propose(question)
            columns = {"prompt": question.prompt, "answer": answer, "kernel": take(answer).kernel}
            proposal = searches.asked(self.engine, self.run.id, proposal.number, **columns)
        return self._judged(proposal)

    def _question(self, step: Step, proposal: Proposal) -> Question:
        assert proposal.parent is not None
        parent = self.proposals[proposal.parent]
        kernel, feedback = parent.kernel or "", parent.feedback or ""
        return Question(
            run=self.run.name,
            step=step.number,
            number=proposal.number,
            problem=public(self.plan.problem),
            backend=self.plan.backend,
            kernel=kernel,
            scores=parent.scores or {},
            feedback=feedback,
            summary=step.summary,
            prompt=prompt(self.plan.problem, self.plan.backend, kernel, feedback, step.summary),
        )

    def _judged(self, proposal: Proposal) -> Proposal:
        kernel = proposal.kernel or ""
        try:
            request = self.plan.request(kernel, kernel_label=f"{self.run.name}-{proposal.number}")
        except InvalidRequest as refused:
            return searches.ended(
                self.engine,
                self.run.id,
                proposal.number,
                scores=dict.fromkeys(self.metrics, _REFUSED),
                message=str(refused),
                feedback=f"FAILED: {refused}\n{_origin(proposal)}".rstrip(),
            )
        verdict, scores = self._verdict(request, sha256(kernel.encode()).hexdigest())
        return self._record(
            proposal, verdict, scores, needed=None if proposal.number else "the initial kernel", note=_origin(proposal)
        )

    def _test(self, step: Step, best: Proposal) -> dict[str, Any]:
        """Judge the best kernel once more, because the best of many measurements is biased."""
        label = f"{self.run.name}-test-{step.number}"
        verdict, scores = self._verdict(
            self.plan.request(best.kernel or "", kernel_label=label), f"test/{step.number}", fresh=True
        )
        test = {"number": best.number, "scores": scores, "evaluation_id": str(verdict.evaluation_id)}
        return test | _columns(verdict)

    def _verdict(self, request: Request, name: str, *, fresh: bool = False) -> tuple[Verdict, dict[str, float] | None]:
        """Judge a kernel under a key that depends on ``name``. Return its verdict and scores."""
        attempt = 0
        while True:
            ticket = self.client.submit(self._request(request, name, attempt, fresh=fresh))
            verdict = ticket.wait()
            scores = scores_of(self.metrics, verdict)
            if not is_to_be_judged_again(verdict, scores, created=ticket.created, attempt=attempt):
                return verdict, scores
            attempt += 1


def _origin(proposal: Proposal) -> str:
    """Return the location of a proposal's kernel in its answer. Empty for the initial kernel."""
    taken = take(proposal.answer or "")
    return taken.note if taken.kernel == proposal.kernel else ""


def _in_threads(
    work: Callable[[_ItemT], _ResultT], items: Sequence[_ItemT], most: int
) -> Iterator[tuple[_ItemT, Future[_ResultT]]]:
    """Yield each item with its result as it is completed. If the caller stops, no other item is begun."""
    # The threads are daemons: after Ctrl-C, a model's late answer is not worth the wait.
    todo, done, over = iter(items), queue.SimpleQueue[tuple[_ItemT, Future[_ResultT]]](), threading.Event()

    def loop() -> None:
        for item in todo:
            if over.is_set():
                return
            future = Future[_ResultT]()
            try:
                future.set_result(work(item))
            except BaseException as error:  # noqa: BLE001 raised again where the results are read
                future.set_exception(error)
            done.put((item, future))

    for _ in range(min(most, len(items))):
        threading.Thread(target=loop, daemon=True).start()
    try:
        for _ in items:
            yield done.get()
    finally:
        over.set()


def answer_of(entry: Entry, values: Mapping[str, str], **more: int) -> str:
    """Return the answer of a proposal that stands for an entry."""
    answer = {"calls": entry.calls, "repeat": entry.repeat, "given": entry.config == ORIGINAL, "values": values}
    return json.dumps(answer | more, ensure_ascii=False)


def entry_of(proposal: Proposal) -> Entry:
    """Parse a proposal's answer. The kernel of a tournament is named by its index."""
    try:
        answer: dict[str, Any] = json.loads(proposal.answer or "")
        values = [int(answer["index"])] if "index" in answer else [] if answer["given"] else answer["values"].values()
        return Entry(tuple(map(str, values)), int(answer["calls"]), int(answer["repeat"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InvalidRequest(f"proposal {proposal.number} belongs to no tuning run or tournament") from None


def results_of(plan: Task, proposals: Iterable[Proposal]) -> list[Result]:
    """Return the results of a run's ended proposals, or raise InvalidRequest for a wrong record."""
    return [result_of(plan, one) for one in proposals if one.ended_at is not None]


def result_of(plan: Task, proposal: Proposal) -> Result:
    """Return the result of a proposal."""
    scores = proposal.scores or {}
    return Result(
        entry_of(proposal), proposal.category == "passed", scores.get(plan.metrics[0]), scores.get(DEVICE, 0.0)
    )


class Batches(Runner[_PlanT]):
    """A run whose steps are batches of evaluations. If it fails, it cancels its open evaluations.

    A proposal is one evaluation of an entry. Its ``answer`` names the configuration with the number of timed calls, as
    JSON, and its ``kernel`` is the source.
    """

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
