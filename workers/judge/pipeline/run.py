"""Driver of one evaluation, from a request to an outcome.

Timing and the checks of small inputs hold the device exclusively by the slot's lock. The reference's answers, its
verifications and the checks of large inputs overlap with the same work of other slots, but with no timing. Everything
else overlaps with all work of other slots.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from kqueue.backends import PYTEST
from kqueue.categories import Blame, Category
from kqueue.contract import Outcome, Phase, Policy, Request
from kqueue.passes import Pass
from kqueue.shapes import Shape
from workers.judge.backend import JudgeBackend
from workers.judge.channel import flags
from workers.judge.channel.gpu_memory import CudaCallError
from workers.judge.channel.protocol import Tag
from workers.judge.ending import EvaluationEnded
from workers.judge.forkserver.control import Counted, Report
from workers.judge.forkserver.handle import ForkServer
from workers.judge.host.status_page import StatusPage
from workers.judge.pipeline import group, passes, static
from workers.judge.pipeline.blame import ABOUT_VALUES, OutOfAllowance
from workers.judge.pipeline.context import Context, Grant
from workers.judge.pipeline.cpu import CpuTime
from workers.judge.pipeline.pytest_run import run_tests
from workers.judge.pipeline.shapes import Judged, combine
from workers.judge.pipeline.sizes import judge_further
from workers.judge.pipeline.stages import clean_up
from workers.judge.pipeline.stages.conclude import begin_stop, conclude, stop, verify
from workers.judge.pipeline.stages.load import build, load
from workers.judge.pipeline.stages.measure import Measured, measure
from workers.judge.pipeline.stages.prepare import prepare
from workers.judge.pipeline.stages.refer import Referenced, refer
from workers.judge.slot_config import SlotConfig

#: Categories of checks that took too long: the kernel's, or the reference's, which draws and answers between them.
_OVERDUE: Final = frozenset({Category.TIMEOUT, Category.REFERENCE_TIMEOUT})


def evaluate(
    request: Request, slot: SlotConfig, backend: JudgeBackend, status_page: StatusPage, forkserver: ForkServer
) -> Outcome:
    """Judge one request in this process: the shapes of its problem one after the other, until the kernel fails.

    Args:
        backend: storage of environments, baselines and suspect GPU reports.
        status_page: page for the current phase, by which the requester explains this process's death.

    Returns:
        The outcome, blamed on the candidate, the problem or the fleet.

    Raises:
        Exception: the judge itself failed, which shows nothing about the kernel.
    """
    listed, backward = static.shapes_of(request), static.asks_backward(request)
    both, further = (Pass.BOTH if backward else None), None
    whole = _Evaluation(slot, backend, status_page, forkserver, max(1, len(listed)))
    judged: list[tuple[Shape | None, list[_Turn]]] = []
    with forkserver.one_build():
        for shape in listed or (None,):
            if judged and not whole.goes_on():
                break
            judged.append((shape, turns := [whole.judge(request, shape, both)]))
            if backward and turns[0].context.settings.timing.enabled and whole.goes_on():
                turns.append(whole.judge(request, shape, Pass.FORWARD))
        asks_further = not listed and not backward and request.settings.policies.shapes is not Policy.ALLOW
        if asks_further and whole.goes_on():
            further = judge_further(request, lambda other: whole.judge(other, optional=True).result)
        whole.end()
    results: list[Judged] = []
    for shape, turns in itertools.takewhile(lambda _: not results or results[-1].outcome.passed, judged):
        outcome = turns[0].result
        if len(turns) > 1 and outcome.passed:
            outcome = passes.combine(outcome, turns[1].result)
        if shape is None:
            return outcome if further is None or not outcome.passed else further(outcome)
        results.append(Judged(shape, outcome, sum(turn.seconds for turn in turns)))
    return combine(listed, results, on_gpu=slot.on_gpu)


@dataclass(slots=True, eq=False)
class _Turn:
    """The judgement of a shape or a pass, from its context on.

    Attributes:
        outcome: None as long as it can pass.
        found: the reference and the times of a kernel that can pass.
        ran_out: whether the reference ran out of its memory.
        seconds: the time that it has taken.
    """

    context: Context
    outcome: Outcome | None = None
    found: tuple[Referenced, Measured] | None = None
    is_verified: bool = False
    ran_out: bool = False
    seconds: float = 0.0

    @property
    def is_hidden(self) -> bool:
        """True if only the result is shown."""
        return self.context.shape is not None and self.context.shape.held_out

    @property
    def result(self) -> Outcome:
        """The outcome, or a pass as long as there is none."""
        return self.outcome or Outcome(category=Category.PASSED, message="")

    def run(self) -> Outcome | None:
        """Run the stages up to the last call. Return the outcome if it is known."""
        context = self.context
        prepare(context)
        with context.watch:
            if context.request.backend == PYTEST:
                return run_tests(context)
            if world := static.world(context.request.problem):
                return group.judge(context, world)
            referenced, candidate = refer(context), build(context)
            load(context, referenced, candidate)
            self.found = referenced, measure(context, referenced, candidate)
        return None

    def verify(self) -> None:
        """Verify the timed calls, once."""
        if self.found is not None and not self.is_verified:
            verify(self.context, self.found[1])
            self.is_verified = True

    def finish(self) -> None:
        """Verify the timed calls while the candidate ends, which all turns have shared."""
        context, candidate = self.context, self.context.processes.candidate
        assert candidate is not None
        begin_stop(context, candidate)
        self.verify()
        stop(context, candidate)
        context.device.test(final=True)

    def conclude(self) -> Outcome:
        """Return the outcome when the candidate is gone."""
        assert self.found is not None
        with self.context.watch:
            return conclude(self.context, *self.found)

    def attempt(self, work: Callable[[], Outcome | None]) -> None:
        """Do a part of the work, which can decide the outcome."""
        context, begun = self.context, time.monotonic()
        try:
            self.outcome = work()
        except EvaluationEnded as ended:
            context.compared.add(ended.outcome.facts.errors, ended.faults)
            self.outcome, self.ran_out = _doubted(context, ended), isinstance(ended, OutOfAllowance)
        except (torch.OutOfMemoryError, torch.AcceleratorError, CudaCallError) as error:
            self.outcome = clean_up.blame_for(context, error)
        self.seconds += time.monotonic() - begun


class _Evaluation:
    """The turns of one evaluation. They share their processes until one fails, and those end together."""

    def __init__(
        self, slot: SlotConfig, backend: JudgeBackend, status_page: StatusPage, forkserver: ForkServer, parts: int
    ) -> None:
        """Judge nothing yet. ``parts`` is the number of shapes that share the time for timed calls."""
        self._around = (slot, backend, status_page, forkserver, CpuTime())
        self._parts = parts
        #: Turns whose processes run, and whether the last turn can pass or has passed.
        self._open: list[_Turn] = []
        self._passes = False
        self._is_examined = False
        #: The candidate's figures before the first shape that is held out.
        self._shown: Counted | Report | None = None

    def judge(
        self, request: Request, shape: Shape | None = None, pass_: Pass | None = None, *, optional: bool = False
    ) -> _Turn:
        """Judge a shape or a pass as far as its processes are needed. Start again with more resources for lack of them.

        ``optional``: the evaluation goes on if the reference refuses the problem.
        """
        granted = frozenset[Grant]()
        while True:
            earlier = self._shared(is_hidden=shape is not None and shape.held_out)
            turn = _Turn(Context(request, *self._around, granted, shape, pass_, self._parts, earlier))
            self._open.append(turn)
            turn.attempt(turn.run)
            self._passes = turn.outcome is None
            if turn.outcome is None:
                return turn
            if optional and earlier is not None and turn.outcome.blame is Blame.PROBLEM:
                del self._open[-1]
                if (reference := earlier.processes.reference) is not None:
                    reference.proxy.discard()  # Its context can be broken.
                return turn
            if (missing := self.end()) is None:
                return turn
            granted |= {missing}

    def _shared(self, *, is_hidden: bool) -> Context | None:
        """Return the context whose processes the next turn can use, or None if there is none."""
        if not self._open:
            return None
        earlier = self._open[-1].context
        candidate = earlier.processes.candidate
        assert candidate is not None
        if is_hidden and self._shown is None:
            try:
                self._shown = candidate.process.count()
            except EvaluationEnded:
                self._shown = candidate.process.ended
        if candidate.process.ended is None:
            return earlier
        self.end()
        return None

    def goes_on(self) -> bool:
        """Return whether another turn can follow, after the last turn's timed calls are verified."""
        if self._open:
            last = self._open[-1]
            last.attempt(last.verify)
            if last.outcome is not None:
                self.end()
        return self._passes

    def end(self) -> Grant | None:
        """End the processes, and decide the turns that used them.

        Returns:
            The resource whose lack can have caused the last turn's failure, or None.
        """
        turns, self._open = self._open, []
        if not turns:
            return None
        last, context = turns[-1], turns[-1].context
        candidate = context.processes.candidate
        if last.outcome is None:
            last.attempt(last.finish)
        elif len(turns) > 1 and candidate is not None:
            candidate.process.stop()
        plan = context.budget.plan
        for turn in reversed(turns):
            if turn.outcome is None and last.result.blame is not Blame.FLEET:
                turn.attempt(turn.conclude)
        if len(turns) > 1:
            context.turn_to(runs=False)
            context.budget.plan = plan
        last.outcome, reports = clean_up.settle(context, last.result)
        missing = _missing_grant(context, last.outcome, ran_out=last.ran_out)
        for turn in turns:
            if turn.outcome is None or last.outcome.blame is Blame.FLEET:
                turn.outcome = last.outcome
            is_over = turn is not last or missing is None
            if is_over and not turn.is_hidden and not (self._is_examined and turn.outcome.passed):
                clean_up.examine_kernel(turn.context, turn.outcome)
                self._is_examined = True
        if last.outcome.blame in (Blame.NONE, Blame.CANDIDATE):
            context.processes.begin_next()
        context.budget.release()
        for turn in turns:
            figures = reports
            if self._shown is not None and candidate is not None and not turn.is_hidden:
                figures = reports | {candidate.process: self._shown}
            assert turn.outcome is not None
            turn.outcome = clean_up.complete(turn.context, turn.outcome, figures)
        self._shown, self._passes = None, all(turn.result.passed for turn in turns)
        return missing


def _doubted(context: Context, ended: EvaluationEnded) -> Outcome:
    """Return the outcome, or ``needs_gpu`` if the lack of a GPU can have caused a kernel's or a problem's failure.

    A kernel can claim such a cause. On a CPU it can so escape the blame for its failure, but it cannot pass.
    """
    slot, named, outcome, candidate = context.slot, context.request.backend, ended.outcome, context.processes.candidate
    if slot.on_gpu or outcome.blame not in (Blame.CANDIDATE, Blame.PROBLEM):
        return outcome
    if ended.reply is not None and ended.reply.tag is Tag.NEEDS_GPU:
        why = ""
    elif candidate is None or outcome.blame is Blame.PROBLEM:
        return outcome
    elif outcome.category in ABOUT_VALUES | {Category.NONDETERMINISTIC} and candidate.process.flags[flags.NARROW] != 0:
        why = ". It computes in bfloat16 or float8, where a GPU can round otherwise than Triton's interpreter"
    elif outcome.category is Category.TIMEOUT and outcome.phase is Phase.CHECK and slot.interprets(named):
        why = ". Triton's interpreter can be too slow for it"
    else:
        return outcome
    facts = outcome.facts.model_copy(update={"instead_of": outcome.category})
    message = f"{outcome.message}{why}: judge it on a GPU"
    return outcome.model_copy(update={"category": Category.NEEDS_GPU, "message": message, "facts": facts})


def _missing_grant(context: Context, outcome: Outcome, *, ran_out: bool) -> Grant | None:
    """Return the resource whose lack can have caused the outcome, or None if the evaluation already had it."""
    shared = "untimed_check" in context.steps.begun
    if ran_out:
        grant = Grant.ALL_MEMORY
    elif outcome.category in _OVERDUE and outcome.phase is not Phase.TIME and shared:
        grant = Grant.EXCLUSIVE  # Other slots' work took some of its or the reference's time.
    else:
        return None
    return None if grant in context.granted else grant
