"""The search. Each step is recorded before the next action.

A step is planned (parents and number of proposals), each proposal is written and judged, and the step ends. Everything
is stored in Postgres at once, so a process that resumes the run does only the unrecorded work:

- A step's plan is one transaction.
- An answer is recorded before its kernel is submitted, so a proposer is never asked twice.
- An evaluation's idempotency key depends only on the run and the kernel, so a kernel is judged once in a run, whether
  its verdict was recorded or not.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final, Protocol, TypeVar

from sqlalchemy import Engine

from kqueue.client import Client
from kqueue.contract import Request, Verdict
from kqueue.errors import InvalidRequest, ProposerFailed
from kqueue.feedback import describe
from kqueue.integrations.extraction import take
from kqueue.search.judging import asked, columns, is_to_be_asked_again, recorded, without_score
from kqueue.search.metrics import Metric, scores_of
from kqueue.search.plan import Plan
from kqueue.search.population import Candidate, Expansion, choose, fronts
from kqueue.search.prompts import digest, prompt
from kqueue.search.proposers import Proposer, Question
from kqueue.store import searches
from kqueue.store.searches import Proposal, Run, Step

_ItemT = TypeVar("_ItemT")
_ResultT = TypeVar("_ResultT")

#: Score of a source that is not a kernel, under any metric.
_REFUSED: Final = 0.0


class Watcher(Protocol):
    """A receiver of progress, called in the thread that runs the search."""

    def proposal(self, proposal: Proposal, done: int, planned: int) -> None:
        """Handle the end of a proposal, after which ``done`` of the step's ``planned`` ones have ended."""
        ...

    def step(self, step: Step, proposals: Mapping[int, Proposal]) -> None:
        """Handle the end of a step."""
        ...


def search(
    engine: Engine,
    client: Client,
    run: Run,
    plan: Plan,
    proposer: Proposer,
    metrics: Mapping[str, Metric],
    watchers: Sequence[Watcher] = (),
) -> list[Proposal]:
    """Run a search to its end, starting from its recorded state. Return all proposals.

    The run can always be resumed.

    Args:
        client: judges kernels, perhaps on another fleet.
        metrics: the scores by their names.
        watchers: receivers of progress.

    Raises:
        InvalidRequest: another process runs it, or a metric's function failed.
        EvaluationFailed: the initial kernel has no score, for example because the fleet or the problem failed.
        ProposerFailed: no proposal of a step got an answer.
        ServiceError: a service failed.
    """
    with recorded(engine, run, plan):
        return _Search(engine, client, run, plan, proposer, metrics, watchers).to_the_end()


def best_of(proposals: Sequence[Proposal] | Mapping[int, Proposal]) -> list[Proposal]:
    """Return the best proposals, the oldest first. Of several with the same scores return only the oldest."""
    ordered = list(proposals.values()) if isinstance(proposals, Mapping) else list(proposals)
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


class _Search:
    def __init__(
        self,
        engine: Engine,
        client: Client,
        run: Run,
        plan: Plan,
        proposer: Proposer,
        metrics: Mapping[str, Metric],
        watchers: Sequence[Watcher],
    ) -> None:
        self._engine = engine
        self._client = client
        self._run = run
        self._plan = plan
        self._proposer = proposer
        self._metrics = metrics
        self._watchers = watchers
        self._steps = {step.number: step for step in searches.steps(engine, run.id)}
        self._proposals = {one.number: one for one in searches.proposals(engine, run.id)}

    def to_the_end(self) -> list[Proposal]:
        for number in range(self._plan.num_steps + 1):
            step = self._steps.get(number) or self._begin(number)
            if step is None:
                break
            if step.ended_at is None:
                self._steps[number] = step
                self._work(self._summarized(step))
                self._end(step)
        return list(self._proposals.values())

    def _begin(self, number: int) -> Step | None:
        """Plan a step. Return None if the proposer has no further kernels."""
        if number == 0:
            planned = [{"number": 0, "parent": None, "kernel": self._plan.kernel, "answer": ""}]
        else:
            proposals = list(self._proposals.values())
            plan = self._plan
            chosen = choose(
                plan.algorithm, _candidates(proposals), _expansions(proposals), plan.num_candidates, plan.epsilon
            )
            parents = [one.number for one in chosen for _ in range(self._plan.num_proposals)]
            first = max(self._proposals) + 1
            planned = [{"number": first + offset, "parent": parent} for offset, parent in enumerate(parents)]
            if self._proposer.most is not None:
                planned = [one for one in planned if one["number"] <= self._proposer.most]
            if not planned:
                return None
        text = digest([*self._proposals.values()]) if number and self._plan.algorithm.summarizes else None
        step, made = searches.begin_step(self._engine, self._run.id, number, planned, text)
        self._proposals |= {one.number: one for one in made}
        return step

    def _summarized(self, step: Step) -> Step:
        if step.digest is None or step.summary is not None:
            return step
        summary = self._proposer.summarize(self._plan.problem, step.digest)
        return searches.update_step(self._engine, self._run.id, step.number, summary=summary)

    def _work(self, step: Step) -> None:
        """Let all open proposals of a step be written and judged."""
        mine = [one for one in self._proposals.values() if one.step == step.number]
        waiting = [one for one in mine if one.ended_at is None]
        failed = list[tuple[Proposal, ProposerFailed]]()
        for one, result in _in_threads(lambda one: self._proposal(step, one), waiting, self._plan.num_threads):
            if isinstance(result, ProposerFailed):
                failed.append((one, result))
            else:
                self._note(result, mine)
        if failed and len(failed) == len(mine):
            raise failed[0][1]
        for one, error in failed:
            self._note(searches.ended(self._engine, self._run.id, one.number, error=str(error)), mine)

    def _note(self, proposal: Proposal, mine: Sequence[Proposal]) -> None:
        self._proposals[proposal.number] = proposal
        done = sum(self._proposals[one.number].ended_at is not None for one in mine)
        for watcher in self._watchers:
            watcher.proposal(proposal, done, len(mine))

    def _end(self, step: Step) -> None:
        best = next(iter(best_of(self._proposals)), None)
        every = self._plan.test_frequency
        test = self._test(step, best) if best is not None and every and step.number and step.number % every == 0 else {}
        ended = searches.update_step(
            self._engine, self._run.id, step.number, ended=True, best=None if best is None else best.number, **test
        )
        self._steps[step.number] = ended
        for watcher in self._watchers:
            watcher.step(ended, self._proposals)

    # Code that runs in threads ----------------------------------------------------------------------------

    def _proposal(self, step: Step, proposal: Proposal) -> Proposal | ProposerFailed:
        if proposal.answer is None:
            question = self._question(step, proposal)
            try:
                answer = self._proposer.propose(question)
            except ProposerFailed as error:
                return error
            proposal = searches.asked(
                self._engine,
                self._run.id,
                proposal.number,
                prompt=question.prompt,
                answer=answer,
                kernel=take(answer).kernel,
            )
        return self._judged(proposal)

    def _question(self, step: Step, proposal: Proposal) -> Question:
        assert proposal.parent is not None
        parent = self._proposals[proposal.parent]
        kernel, feedback = parent.kernel or "", parent.feedback or ""
        return Question(
            run=self._run.name,
            step=step.number,
            number=proposal.number,
            problem=self._plan.problem,
            backend=str(self._plan.backend),
            kernel=kernel,
            scores=parent.scores or {},
            feedback=feedback,
            summary=step.summary,
            prompt=prompt(self._plan.problem, str(self._plan.backend), kernel, feedback, step.summary),
        )

    def _judged(self, proposal: Proposal) -> Proposal:
        kernel = proposal.kernel or ""
        try:
            request = self._plan.request(kernel, kernel_label=f"{self._run.name}-{proposal.number}")
        except InvalidRequest as refused:
            return searches.ended(
                self._engine,
                self._run.id,
                proposal.number,
                scores=dict.fromkeys(self._metrics, _REFUSED),
                message=str(refused),
                feedback=f"FAILED: {refused}\n{_origin(proposal)}".rstrip(),
            )
        verdict, scores = self._verdict(request, sha256(kernel.encode()).hexdigest())
        if scores is None and proposal.number == 0:
            # The search needs it to choose from. It stays open, so that a resumed run judges it again.
            raise without_score(verdict, "the initial kernel", self._metrics)
        return searches.ended(
            self._engine,
            self._run.id,
            proposal.number,
            evaluation_id=verdict.evaluation_id,
            scores=scores,
            feedback=describe(verdict, kernel, note=_origin(proposal)),
            **columns(verdict),
        )

    def _test(self, step: Step, best: Proposal) -> dict[str, Any]:
        """Judge the best kernel once more, because the best of many measurements is biased."""
        label = f"{self._run.name}-test-{step.number}"
        verdict, scores = self._verdict(
            self._plan.request(best.kernel or "", kernel_label=label), f"test/{step.number}", fresh=True
        )
        test = {"number": best.number, "scores": scores, "evaluation_id": str(verdict.evaluation_id)}
        return {"test": test | columns(verdict)}

    def _verdict(self, request: Request, name: str, *, fresh: bool = False) -> tuple[Verdict, dict[str, float] | None]:
        """Judge a kernel under a key that depends on ``name``. Return its verdict and scores."""
        attempt = 0
        while True:
            ticket = self._client.submit(asked(request, self._run, name, attempt, fresh=fresh))
            verdict = ticket.wait()
            scores = scores_of(self._metrics, verdict)
            if not is_to_be_asked_again(verdict, scores, created=ticket.created, attempt=attempt):
                return verdict, scores
            attempt += 1


def _origin(proposal: Proposal) -> str:
    """Return the location of a proposal's kernel in its answer. Empty for the initial kernel."""
    taken = take(proposal.answer or "")
    return taken.note if taken.kernel == proposal.kernel else ""


def _in_threads(
    work: Callable[[_ItemT], _ResultT], items: Sequence[_ItemT], most: int
) -> Iterator[tuple[_ItemT, _ResultT]]:
    """Yield each item with its result as it is completed. Raise an exception of ``work``, and begin no other item."""
    # The threads are daemons: after Ctrl-C, a model's late answer is not worth the wait.
    todo, done = queue.SimpleQueue[_ItemT](), queue.SimpleQueue[tuple[_ItemT, _ResultT | None, BaseException | None]]()
    over = threading.Event()

    def loop() -> None:
        while not over.is_set():
            try:
                item = todo.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((item, work(item), None))
            except BaseException as error:  # noqa: BLE001 raised again where the results are read
                done.put((item, None, error))

    for item in items:
        todo.put(item)
    for _ in range(min(most, len(items))):
        threading.Thread(target=loop, daemon=True).start()
    try:
        for _ in items:
            item, result, error = done.get()
            if error is not None:
                raise error
            yield item, result  # pyright: ignore[reportReturnType] there is one without an error
    finally:
        over.set()
