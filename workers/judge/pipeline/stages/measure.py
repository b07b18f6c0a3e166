"""Stage ``measure``: the candidate's calls are checked and timed."""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Final

import torch

from kqueue.categories import Blame, Category
from kqueue.contract import Phase, Policy
from kqueue.evidence import SpeedOfLightBound
from kqueue.profiles import RULES
from kqueue.text import one_line
from workers.judge.channel.activities import NotRecorded
from workers.judge.channel.orders import Call, Order
from workers.judge.ending import EvaluationEnded
from workers.judge.pipeline import compare, parameters, speed_of_light, timing
from workers.judge.pipeline.blame import ABOUT_FORM, ABOUT_VALUES
from workers.judge.pipeline.cases import GIVEN, Case
from workers.judge.pipeline.clocks import CpuClock, GpuClock, TimedCall
from workers.judge.pipeline.context import Context, Grant
from workers.judge.pipeline.estimator import Series
from workers.judge.pipeline.evidence import Compared
from workers.judge.pipeline.exchange import Candidate
from workers.judge.pipeline.kept import KeptCalls
from workers.judge.pipeline.reference import Reference
from workers.judge.pipeline.stages.refer import Referenced

#: Maximum and minimum number of timed calls that are verified. A slow reference verifies fewer.
_MOST_PROOFS: Final = 8
_FEWEST_PROOFS: Final = 2
#: Maximum number of checked calls on small inputs that are made together.
_TOGETHER: Final = 16
#: Number of calls that repeat a wrong one. A kernel that treats every second call differently is right in one of two.
_REPETITIONS: Final = 2


@dataclass(frozen=True, slots=True)
class Times:
    """Timed calls of a candidate, some of which are kept to be verified.

    Attributes:
        series: times of the candidate.
        beside: times of the reference in turn with the candidate, or None.
        bound: the speed-of-light bound, or None on a CPU.
    """

    stopwatch: timing.Stopwatch
    kept: KeptCalls
    series: Series
    beside: Series | None
    bound: SpeedOfLightBound | None


@dataclass(frozen=True, slots=True)
class Measured:
    """A candidate that was right in all checked calls, on ``checks`` input sets, with its times if it was timed.

    ``hidden_weights`` are names of weights and state whose constant initial values hide a part of the reference.
    """

    candidate: Candidate
    checks: int
    times: Times | None
    hidden_weights: list[str]


def measure(context: Context, referenced: Referenced, candidate: Candidate) -> Measured:
    """Check and time the candidate."""
    steps = context.steps
    with steps.timed("wait_for_processes"):
        context.device.before_timing()
    checks, times, checked = _Checks(context, referenced, candidate), None, 0
    shares, timed = shares_checks(context, referenced.reference), referenced.baseline is not None
    if shares:
        with steps.untimed("check"), steps.backstop(Phase.CHECK):
            checked = checks.run()
    if timed or not shares:
        with contextlib.ExitStack() as bound:
            beside = None
            if timed and context.slot.on_gpu and timing.turns_together(referenced.reference) > 1:
                # The driver can take milliseconds for memory, which no other slot should wait for.
                timing.reserve_outputs(context.settings.timing, referenced.reference)
                beside = _begin_turns(context, referenced, bound)
            with steps.alone("measure"), steps.backstop(Phase.CHECK):
                if not shares:
                    checked = checks.run()
                if timed:
                    times = _time(context, referenced, candidate, beside, blocks=checks.blocks)
                    if not shares and not times.kept.keeps_all:
                        checks.run_again()
    with context.untimed_if_large(referenced.reference, "check"), steps.backstop(Phase.CHECK):
        if timed and shares:
            checks.run_again()
        hidden_weights = checks.find_hidden_weights()
        checks.profile()
        checks.evaluate()
    return Measured(candidate, checked, times, hidden_weights)


def shares_checks(context: Context, reference: Reference) -> bool:
    """Return whether checked calls share the device with other slots' untimed work."""
    # Large inputs keep the device busy, and the CPU idle, for as long as the timing does. For small inputs, the calls
    # take less time than a second wait for the device.
    has_siblings = context.slot.on_gpu and context.slot.siblings > 1
    return has_siblings and reference.cache.is_large and Grant.EXCLUSIVE not in context.granted


def _begin_turns(context: Context, referenced: Referenced, bound: contextlib.ExitStack) -> timing.Beside | None:
    """Prepare the reference for calls in turn until ``bound`` closes, if there is memory for both processes."""
    baseline = referenced.baseline
    if baseline is None or not context.budget.plan.has_turns:
        return None
    with context.steps.backstop(Phase.CHECK):
        return baseline.beside(bound.enter_context(referenced.reference.timed(beside=True)))


def _time(
    context: Context, referenced: Referenced, candidate: Candidate, beside: timing.Beside | None, *, blocks: bool
) -> Times:
    """Time the candidate by the clock of the baseline, in turn with the reference if there is memory for both."""
    reference, instruments, baseline = referenced.reference, context.instruments, referenced.baseline
    assert baseline is not None
    assert instruments is not None
    context.budget.record()
    by_deadline = int(reference.proxy.left_s / 2 / reference.forward_s)
    most = max(_FEWEST_PROOFS, min(_MOST_PROOFS, by_deadline))
    kept = KeptCalls(reference, most, on_gpu=context.slot.on_gpu)
    stopwatch = timing.Stopwatch(candidate, reference, context.slot, instruments, kept)
    with contextlib.ExitStack() as late, context.steps.timed("time"):
        beside = beside or _begin_turns(context, referenced, late)
        series, other = stopwatch.measure(
            context.settings.timing,
            basis="cpu_clock" if blocks else baseline.basis,
            beside=beside,
            variants=referenced.variants,
        )
    context.budget.record()
    bound = None
    if instruments.flusher is not None:
        bandwidth = instruments.flusher.bandwidth()
        bound = speed_of_light.floor(reference.cache.input_bytes, reference.written_bytes, bandwidth)
    context.evidence.floor = bound
    return Times(stopwatch, kept, series, other, bound)


class _Checks:
    """Checked calls, whose answers are compared with the reference's."""

    def __init__(self, context: Context, referenced: Referenced, candidate: Candidate) -> None:
        """Prepare without making a call."""
        self._context = context
        self._steps = context.steps
        self._evidence, self._compared = context.evidence, context.compared
        self._referenced = referenced
        self._reference = referenced.reference
        self._candidate = candidate
        self._caller = _LikeTimed(context, referenced, candidate) if referenced.baseline is not None else None
        self._calls = 0

    @property
    def blocks(self) -> bool:
        """True if the forward waits for the GPU, as far as the calls so far show."""
        return self._caller is not None and self._caller.blocks

    def run(self) -> int:
        """Make all checked calls: every case once, and the first case again. Return the number of cases."""
        cases, reference = self._referenced.cases, self._reference
        with self._steps.timed("check"):
            self._candidate.prepare_calls(reference.form.output_specs, reference.forward_s)
            checked = 0
            later = (reference.cache.fresh() for _ in range(self._referenced.later))
            every = self._made(chain(cases, later, cases[:1]))
            try:
                for number, (case, outputs) in enumerate(every):
                    if number and case is cases[0]:
                        self._compared.is_complete = True
                        self._repeat(case, outputs)
                    elif (compared := self._check(case, outputs)) is not None:
                        self._compared.add(*compared)
                        checked += 1
            except EvaluationEnded as ended:
                if ended.outcome.category in ABOUT_VALUES:
                    self._compared.add(ended.outcome.facts.errors, ended.faults)
                    self._compare_rest(every)
                    self._explain()
                    self.evaluate()
                raise
        self._evidence.checks, self._evidence.checks_asked = checked, self._context.settings.checks
        self._evidence.constant_outputs = constant = tuple(reference.constant_outputs)
        self._evidence.reference_is_constant = bool(constant)
        return checked

    def _repeat(self, case: Case, outputs: list[torch.Tensor] | None) -> None:
        """Check the second call on the first case."""
        try:
            self._compared.add(*self._confirmed(case, outputs))
        except EvaluationEnded as ended:
            raise unless_repeated(ended, "right at first, wrong when the same input was run again") from None

    def run_again(self) -> None:
        """Make one checked call on a new input after the timing."""
        self._candidate.process.enter(Phase.CHECK, self._context.settings.deadlines.check_s)
        case = self._referenced.last or self._reference.cache.fresh()
        try:
            self._confirmed(case)
        except EvaluationEnded as ended:
            raise unless_repeated(ended, "right before it was timed, wrong after") from None

    def find_hidden_weights(self) -> list[str]:
        """Return weights and state that initial values hide, unless the kernel follows the reference when they differ.

        A gate is a weight that is constructed as zeros, and it hides other weights. State hides a part of itself if it
        is one number at first. A kernel whose gates and state have the same names gets the same random values.
        """
        reference, proxy, process = self._reference, self._reference.proxy, self._candidate.process
        is_small, has_state = reference.cache.is_roomy, len(reference.form.unkept) < len(reference.form.buffers)
        if not (is_small or has_state):
            return []
        seed, names, what = secrets.randbits(62) + 1, list[str](), "gradients of the model's weights"
        case = reference.cache.fresh()
        process.enter(Phase.CHECK, self._context.settings.deadlines.check_s)
        try:
            with self._steps.backstop(Phase.REFERENCE):
                if is_small:
                    found = proxy.order(Order.EFFECTS, what=what, optional=True, payload=case.slot, seed=case.seed)
                    names = found.message.splitlines()
                if not (names or has_state):
                    return []
                names += proxy.order(Order.MOVE, what=what, seed=seed).message.splitlines()
                outputs = reference.outputs(case, whole=True)
            process.order(Order.MOVE, seed=seed)
            if outputs is not None:
                moved = replace(case, outputs=outputs, exact=None, moved=tuple)
                moved.again = functools.cache(functools.partial(reference.again, moved))
                compare.check_values(self._candidate.answer(case), moved, self._context.settings)
                names = []
        except EvaluationEnded as ended:
            if ended.outcome.blame is Blame.FLEET or proxy.process.ended is not None:
                raise
        if proxy.process.ended is None:
            proxy.order(Order.MOVE, what="the model")
        with contextlib.suppress(EvaluationEnded):  # A candidate that fails now has no profile and no other answers.
            process.order(Order.MOVE)
        return [one_line(name) for name in names]

    def profile(self) -> None:
        """Profile the candidate to learn which kernels do its work. This comes last: it can end the candidate."""
        policy, case = self._context.settings.policies.decoys, self._referenced.first
        if not self._context.slot.on_gpu or policy is Policy.ALLOW:
            return
        with self._steps.timed("provenance"):
            self._has_answered(case)
            try:
                self._candidate.profile(case)
            except NotRecorded as error:
                self._evidence.provenance_error = str(error)
            except EvaluationEnded as ended:
                self._evidence.provenance_error = str(ended)
                if policy is Policy.REJECT:
                    raise  # A candidate could end itself to escape profiling.

    def evaluate(self) -> None:
        """Compare answers of both models in ``eval()`` mode, for profiles that need them. This comes last."""
        names = [str(name) for name in self._context.settings.profiles if RULES[name].evaluates]
        if not names:
            return
        process, faults = self._candidate.process, dict[str, str]()
        try:
            process.enter(Phase.CHECK, self._context.settings.deadlines.check_s)
            process.order(Order.EVALUATE)
            for _ in range(self._context.settings.checks):
                case = self._reference.cache.fresh()
                with self._steps.backstop(Phase.REFERENCE):
                    outputs = self._reference.outputs(case, evaluates=True)
                self._steps.enter(Phase.CHECK)
                if outputs is None:
                    return
                answer = self._candidate.answer(case)[: self._reference.form.returned]
                again = compare.by_profiles(answer, replace(case, outputs=outputs, exact=None), self._context.settings)
                faults = again | {name: fault for name, fault in faults.items() if fault}
        except EvaluationEnded as ended:
            if ended.outcome.blame is not Blame.CANDIDATE:
                return  # The problem has no answers in this mode, or the fleet failed.
            faults = dict.fromkeys(names, ended.outcome.message)
        self._compared.add(None, faults)

    def _made(self, cases: Iterator[Case]) -> Iterator[tuple[Case, list[torch.Tensor] | None]]:
        """Yield the cases that the reference answers, and the kernel's outputs where the calls were made together."""
        answered = (case for case in cases if self._has_answered(case))
        # A first call can compile and load code, and it differs from a timed call anyway.
        yield from ((case, None) for case in islice(answered, 1))
        is_small = self._caller is not None and timing.turns_together(self._reference) > 1
        size = _TOGETHER if is_small else 1
        while some := list(islice(answered, size)):
            if self._caller is None or size == 1:
                yield from ((case, None) for case in some)
            else:
                yield from zip(some, self._caller.call(some), strict=True)

    def _compare_rest(self, cases: Iterator[tuple[Case, list[torch.Tensor] | None]]) -> None:
        """Compare further given cases until a wrong kernel has failed both verdicts and all profiles."""
        with contextlib.suppress(EvaluationEnded):  # The reference's failure no longer matters.
            for case, outputs in cases:
                errors, faults = self._compared.errors, self._compared.faults
                is_right = errors is not None and (errors.strict_correct or errors.kernelbench_correct)
                if not is_right and all(faults.values()):
                    break
                if case.kind == GIVEN and case is not self._referenced.cases[0]:
                    self._compare_one(case, outputs)
            self._compared.is_complete = True

    def _explain(self) -> None:
        """Record facts that can explain wrong values. The kernel reports its own parameters, so they decide nothing."""
        evidence, proxy = self._evidence, self._reference.proxy
        evidence.reference_draws = self._reference.form.draws or None
        with contextlib.suppress(EvaluationEnded):  # The verdict is known already.
            theirs = proxy.order(Order.DESCRIBE, what="the parameters", optional=True).message
            evidence.training_modules = tuple(parameters.modes(theirs)) or None
            self._candidate.process.enter(Phase.CHECK, self._context.settings.deadlines.check_s)
            mine = self._candidate.process.order(Order.DESCRIBE).message
            evidence.parameters = parameters.difference(mine, theirs, self._reference.form.buffers)

    def _compare_one(self, case: Case, outputs: list[torch.Tensor] | None) -> None:
        """Compare one more answer of a wrong kernel. A missing answer fails both verdicts and all profiles."""
        try:
            self._compared.add(*self._call(case, outputs))
        except EvaluationEnded as ended:
            self._compared.add(ended.outcome.facts.errors, ended.faults)
            if ended.outcome.category not in ABOUT_VALUES:
                worst, failed = self._compared.errors, {"strict_correct": False, "kernelbench_correct": False}
                faults = dict.fromkeys(self._compared.faults, ended.outcome.message)
                self._compared.add(worst and worst.model_copy(update=failed), faults)

    def _call(self, case: Case, outputs: list[torch.Tensor] | None = None) -> Compared:
        """Make one checked call on a case, unless it was made, and compare its outputs."""
        return compare.check_values(self._outputs(case, outputs), case, self._context.settings)

    def _outputs(self, case: Case, outputs: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Return the outputs of a call, made unless they are given. Only the first call differs from a timed call."""
        self._has_answered(case)
        if self._caller is None or not self._calls:
            self._calls += 1
            outputs = self._candidate.answer(case)
            self._candidate.check_inputs(case)
        elif outputs is None:
            [outputs] = self._caller.call([case])
        return outputs

    def _has_answered(self, case: Case) -> bool:
        """Return whether the reference has an answer to the case, after running it if needed."""
        with self._steps.backstop(Phase.REFERENCE):
            answered = bool(self._reference.answer(case))
        self._steps.enter(Phase.CHECK)
        return answered

    def _check(self, case: Case, outputs: list[torch.Tensor] | None) -> Compared | None:
        """Make one checked call unless it was made, and repeat it if the answer is wrong.

        Return None for a variant of which the reference did not confirm its answer. It does not count as checked.
        """
        try:
            return self._confirmed(case, outputs)
        except EvaluationEnded as ended:
            if ended.outcome.category not in ABOUT_VALUES:
                raise
            first = ended.with_traceback(None)  # Its frames hold the outputs.
        if not self._has_answered(case):
            return None
        for _ in range(_REPETITIONS):
            try:
                self._call(case)
            except EvaluationEnded as again:
                if again.outcome.category not in ABOUT_VALUES:
                    break
            else:
                raise unless_repeated(first, "wrong at first, right when the same input was run again")
        raise first

    def _confirmed(self, case: Case, outputs: list[torch.Tensor] | None = None) -> Compared:
        """Make one checked call unless it was made. The reference's answer is confirmed before it is called wrong.

        The judge's copies of outputs are then compared once more, because the reference's own errors are a sample. The
        outputs of the first call are no copies, so the kernel could change them meanwhile.
        """
        are_copies = self._caller is not None and self._calls > 0
        try:
            outputs = self._outputs(case, outputs)
            return compare.check_values(outputs, case, self._context.settings)
        except EvaluationEnded as ended:
            if (category := ended.outcome.category) not in ABOUT_VALUES | ABOUT_FORM:
                raise
            wrong = ended.with_traceback(None)
        with self._steps.backstop(Phase.REFERENCE):
            (self._reference.confirm_form if category in ABOUT_FORM else self._reference.confirm)(case)
        self._steps.enter(Phase.CHECK)
        if are_copies and outputs is not None and category in ABOUT_VALUES and self._has_answered(case):
            with contextlib.suppress(EvaluationEnded):
                return compare.check_values(outputs, case, self._context.settings)
        raise wrong


class _LikeTimed:
    """Makes checked calls by the orders of timed calls, so that a kernel cannot distinguish them.

    Attributes:
        blocks: True if the forward waits for the GPU, so that calls are made by the order for the CPU's clock.
    """

    def __init__(self, context: Context, referenced: Referenced, candidate: Candidate) -> None:
        baseline, instruments = referenced.baseline, context.instruments
        assert baseline is not None
        assert instruments is not None
        flusher = instruments.flusher if context.settings.timing.cold_l2 else None
        self.blocks = baseline.basis == "cpu_clock"
        self._cpu_clock = CpuClock(flusher, on_gpu=context.slot.on_gpu)
        self._gpu_clock = None if instruments.hold is None else GpuClock(instruments.hold, flusher)
        self._candidate = candidate
        self._misses = 0

    def call(self, cases: Sequence[Case]) -> list[list[torch.Tensor]]:
        """Make a call on each case, and return the judge's copies of the outputs."""
        # The memory plan has room for them only as long as they are compared.
        calls = [TimedCall(self._candidate, Call.PLAIN, case, self._candidate.blanks(), True) for case in cases]
        if self._gpu_clock is not None and not self.blocks:
            self._gpu_clock.time(calls)
            self._misses = self._misses + 1 if calls[-1].sample is None else 0
            self.blocks = self._misses >= timing.MISSES
        self._cpu_clock.time([call for call in calls if call.sample is None])
        return [call.into for call in calls]


def unless_repeated(ended: EvaluationEnded, how: str) -> EvaluationEnded:
    """Return ``nondeterministic`` for a wrong answer on an input that was also answered right, or else ``ended``."""
    outcome = ended.outcome
    if outcome.category not in ABOUT_VALUES:
        return ended
    return EvaluationEnded(
        Category.NONDETERMINISTIC, f"{how}: {outcome.message}", Phase.CHECK, **outcome.facts.model_dump()
    )
