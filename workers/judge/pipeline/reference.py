"""The reference of a problem: the expected outputs of its cases.

Its parts are the proxy of its process, the cache of its cases, and the float64 oracle.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import random
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from kqueue.contract import Comparison, Policy, Precision, Settings
from kqueue.evidence import InputTensor
from workers.judge.channel.bits import checksum
from workers.judge.channel.orders import Order
from workers.judge.channel.protocol import Reply
from workers.judge.channel.randomness import ANY_SIZE, ENDS, KINDS, LARGER, REGION, STEADY
from workers.judge.channel.tensors import LASTING, MAX_DIMS, MAX_STRUCTURE_BYTES, MAX_TENSORS, SHARED, paths
from workers.judge.ending import EvaluationEnded
from workers.judge.forkserver.process import SealedProcess
from workers.judge.pipeline import answers, checker, compare, rounding, static
from workers.judge.pipeline.blame import UNSTEADY_FORM, invalid_problem
from workers.judge.pipeline.case_cache import CaseCache
from workers.judge.pipeline.cases import DTYPES, GIVEN, Case, Form, values_at
from workers.judge.pipeline.exchange import Exchange
from workers.judge.pipeline.oracle import Oracle
from workers.judge.pipeline.proxy import Question, ReferenceProxy, Taken, bytes_of

#: Number of forwards that the remaining time must allow before an optional forward is made.
_UNHURRIED: Final = 16
#: Number of values of an output that show whether it is the same for all inputs.
_SAMPLE: Final = 1 << 16
#: Time in seconds up to which a first forward is repeated, because it also loads and chooses kernels.
_COLD_S: Final = 2.0
#: Ratio of the estimated time of a float64 forward to the time of a plain one.
_WIDE: Final = 2.0
#: Approximate relative change of fp32 inputs that shows whether an answer is stable.
_NUDGE: Final = 2.0**-24
#: Number of answers to slightly changed inputs, which show where a gradient jumps, and size of the change in rounding
#: errors: of fp32, and of 16 bits or TF32. Sums of 4096 terms in another order differ by about 2 of fp32.
_MOVES: Final = 16
_MOVED: Final = (16.0, 2.0)
#: Multiple of the usual bound by which answers in fp32 can change with nudged inputs, for kinds that bring values close
#: together. A variance from sums of squares loses twice as many digits as the inputs of a normalization have in common.
#: The second value is for the larger changes of ``_NUDGE``.
_CLOSE_TOGETHER: Final = (1 / 16, 1 / 8)
#: Change of a variant's inputs in rounding errors after which the problem's check must still accept the answer to them.
_CHECKED: Final = 4.0
_NAN: Final = "the reference's output holds NaN, so nothing can agree with it"
UNSTEADY_INPUTS: Final = "get_inputs() must return the same values when it is called under the same seeds"
#: Number of repeated answers of a quick reference before a kernel is called wrong.
_REPEATS: Final = 8
#: Maximum number of variants from a CPU time in seconds on, of a draw and a forward together.
_FEWER: Final = ((1.0, 3), (0.25, 6))
#: Maximum share of the reference's deadline for variants, and the number of draws and forwards that each can take.
_VARIED_SHARE: Final = 1 / 4
_VARIED_CALLS: Final = 5


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on work beyond the given cases.

    Attributes:
        quick_s: maximum CPU time in seconds of a forward for which the reference is also run in float64 on given cases
            and on all variants.
        exact_s: estimated CPU time in seconds for all float64 calls together.
        larger_s: maximum time in seconds of a forward for the kind ``larger``, which takes a long float64 call, if
            cases are too large to be held together.
        host_bytes: memory for one float64 call on a CPU. On a GPU a share of the process's allowance counts.
        varied_bytes: size of the largest inputs of which all variants are made. Larger inputs get the variants that
            exist for any size.
        arena_bytes: size of the largest arena, or 0 for none.
        variants, timed: maximum number of hidden variants, and of those among the timed calls.
    """

    quick_s: float
    exact_s: float
    larger_s: float
    host_bytes: int
    varied_bytes: int
    arena_bytes: int
    variants: int = sys.maxsize
    timed: int = 3


BOUNDS: Final = {
    "cuda": Bounds(
        quick_s=0.003, exact_s=0.2, larger_s=0.05, host_bytes=0, varied_bytes=256 << 20, arena_bytes=128 << 20
    ),
    "cpu": Bounds(quick_s=0.05, exact_s=3.0, larger_s=0.5, host_bytes=512 << 20, varied_bytes=8 << 20, arena_bytes=0),
}


class Reference:
    """A problem's reference for one evaluation.

    Attributes:
        bounds: limits on work beyond the given cases.
        proxy, cache, oracle: the parts. They share the process, its settings and the form of its calls.
        checker: the check that comes with the problem, or None if the comparison decides.
        written_bytes: bytes of the outputs that are neither inputs nor weights, reported by the process.
        forward_s: shortest time in seconds of a forward, measured by the judge.
        draw_s, call_s: CPU time in seconds of drawing an input set and of a forward, reported by the process.
        case: the first case that was answered.
        wants_region: whether a region of the inputs is one of the variants.
        timed_bytes: GPU memory in bytes that the process can allocate while it is timed and no kernel runs.
    """

    def __init__(
        self,
        process: SealedProcess,
        source: str,
        settings: Settings,
        device: str,
        bounds: Bounds | None = None,
    ) -> None:
        """Use a new or kept process, which runs nothing yet. ``bounds`` replaces the device's :data:`BOUNDS`."""
        self.bounds = bounds or BOUNDS[device]
        self.proxy = ReferenceProxy(process, source, settings, device)
        self.cache = CaseCache(self.proxy)
        self.oracle = Oracle(self.proxy, self.bounds.exact_s, self.bounds.host_bytes)
        self.checker: checker.Checker | None = None
        bound = static.check_bound(source) if settings.comparison is Comparison.STRICT else None
        if bound is not None:
            self.checker = checker.Checker(self.proxy, self.cache, bound)
            self.cache.check = self.checker.refusal
        self.process = process
        self.settings = settings
        self.device = device
        self.form = self.proxy.form
        self.written_bytes = 0
        self.forward_s = math.inf
        self.draw_s = self.call_s = 0.0
        self.wants_region = False
        #: Kinds of variants other than regions, in the order in which they are tried, and their maximum number.
        self._kinds: list[str] = []
        self._most = 0
        self.case: Case | None = None
        self.timed_bytes = 0
        #: Random positions in each output, the first case's values there, whether other given cases have the same, and
        #: numbers of outputs with infinite ones.
        self._some: list[torch.Tensor] = []
        self._first: list[torch.Tensor] = []
        self._same: list[bool] = []
        self._infinite: list[int] = []

    @property
    def is_hurried(self) -> bool:
        """True if there is no time for optional calls."""
        return self.proxy.left_s < _UNHURRIED * self.forward_s

    @property
    def constant_outputs(self) -> list[int]:
        """Numbers of the outputs whose values for one given case would be right for every other given case."""
        return [number for number, is_same in enumerate(self._same) if is_same and self.form.is_returned(number)]

    @property
    def _is_quick(self) -> bool:
        """True if the reference is also run in float64."""
        # A GPU can take long for large inputs, whatever the CPU time.
        may_take_long = self.device == "cuda" and not self.cache.is_roomy
        return max(self.call_s, self.forward_s if may_take_long else 0.0) <= self.bounds.quick_s

    @property
    def _precision(self) -> Precision:
        return self.form.precision(self.settings.precision)

    @property
    def _is_fp32(self) -> bool:
        return self.settings.precision is Precision.FP32

    def describe_inputs(self) -> tuple[InputTensor, ...]:
        """Return shape and dtype of each tensor among the inputs, as evidence."""
        specs = self.cache.input_specs
        dtypes = (str(specs[view.root].dtype).removeprefix("torch.") for view in self.form.views)
        both = zip(self.form.views, dtypes, strict=True)
        return tuple(InputTensor(shape=view.shape, dtype=dtype) for view, dtype in both)

    def differentiate(self, first: Case, *, backward: bool) -> Case:
        """Have the process compute gradients, or only go forward in grad mode, from now on.

        Returns:
            The case with the same inputs, and with upstream gradients for ``backward``.
        """
        self.form.gradients = self.proxy.differentiate(first, "Model.forward in grad mode", backward=backward)
        self.form.differentiates = True
        return self.cache.draw_anew(first)

    def answer_first(self, first: Case) -> int:
        """Answer the first case, which determines the form of a call's outputs. Return the GPU memory that it took."""
        self.answer(first, exactly=False)
        taken = self.proxy.taken()
        if self.bounds.quick_s < taken.call_s < _COLD_S or self.bounds.larger_s <= self.forward_s < _COLD_S:
            first.outputs = self._outputs(self._call(first, afresh=True))
            taken = self.proxy.taken()
        self._learn_state(taken)
        self.oracle.call_s = _WIDE * self.call_s
        self.cache.plan(first)
        if self._is_quick:
            self.oracle.sharpen([first])
            if self.cache.is_roomy and self.device == "cpu":  # on a GPU, other slots would wait meanwhile
                self._repeat(first, 1)
        return taken.peak

    def answer_in_step(self, case: Case) -> None:
        """Draw and answer a given case by exactly one call, which all ranks of a group make at the same time."""
        is_first = self.case is None
        self.cache.present(case, beside=True)
        [answer] = self._ask_together([case], exactly=False)
        case.outputs = self._outputs(answer.reply)
        look = answers.Look(case.outputs, None, None, varied=False, precision=self.settings.precision)
        answers.look_at([look])
        if look.has_nan:
            raise invalid_problem(_NAN)
        if is_first:
            self._learn_state(self.proxy.taken())
            self.cache.plan(case)

    def _learn_state(self, taken: Taken) -> None:
        """Record the buffers and parameters that forward changes, and the times of the calls so far."""
        self.draw_s, self.call_s = taken.draw_s, taken.call_s
        self.form.resets, self.form.initial, self.form.unwatched = taken.resets, taken.initial, taken.unwatched
        self.form.buffers = taken.resets[: len(taken.initial)]
        if self.form.returned + len(self.form.mutated) != self.form.effects:
            raise invalid_problem("the reference reported other buffers than it answered with")
        if self.settings.policies.buffers is Policy.ALLOW:
            self.form.unkept.update(range(self.form.effects, len(self.form.output_specs)))

    def more_cases(self, first: Case) -> list[Case]:
        """Return further given cases, as many as the settings request, each from a secret seed, and variants.

        Where all cases together would take too much memory, return only variants, which are not drawn yet.
        """
        cache, given = self.cache, list[Case]()
        self._choose_kinds(first)
        if cache.is_roomy:
            self.proxy.share_arena(min(cache.wanted_arena(), self.bounds.arena_bytes))
            given = cache.given(self.settings.checks - 1, on_device=first.on_device)
        elif self._most >= len(self._kinds):
            return [cache.new(kind, drawn=first.drawn, on_device=first.on_device) for kind in self._kinds]
        return given + cache.vary(first, self._kinds, self._most)

    def _choose_kinds(self, first: Case) -> None:
        """Choose the kinds of variants to try, and the maximum number of variants.

        The choice depends on sizes, the process's allowance of memory, and CPU times, so that the work of other
        processes does not change it.
        """
        cache, seconds = self.cache, self.draw_s + self.call_s
        if not cache.varies:
            return
        kinds = [*(STEADY if cache.is_bound else ANY_SIZE), REGION]
        is_small = cache.is_roomy and cache.input_bytes <= self.bounds.varied_bytes and not cache.is_bound
        if not (cache.is_roomy or self._is_fp32):
            kinds.remove("skewed")  # Many values in one sum need an exact answer.
        if is_small:
            kinds += ENDS
        most = next((most for least, most in _FEWER if seconds >= least), sys.maxsize)
        if seconds < _FEWER[0][0] and self.oracle.is_useful:
            if is_small and self.oracle.may_ask(first):
                kinds += KINDS
            elif not cache.is_bound and self.oracle.may_ask(first, LARGER):
                kinds.append(LARGER)
        affordable = _VARIED_SHARE * self.settings.deadlines.reference_s / _VARIED_CALLS
        most = min(most, self.bounds.variants, int(affordable / seconds) if seconds else sys.maxsize)
        if most < len(kinds):
            random.SystemRandom().shuffle(kinds)
            # Nothing else has values far beyond the usual range.
            kinds.sort(key=lambda kind: kind not in (KINDS[0], LARGER))
        self.wants_region = REGION in kinds[:most]
        kinds.remove(REGION)
        self._kinds, self._most = kinds, most - self.wants_region

    @property
    def unvaried(self) -> str:
        """Reason why a kernel that passed answered no variant."""
        if self.settings.comparison is not Comparison.STRICT:
            return "the settings ask for KernelBench's comparison"
        if self.settings.given_tolerance is not None:
            return "the settings have their own tolerance"
        if self.cache.has_varied:
            return "the reference has no reliable answer to any"
        if self.cache.is_late or not (self._most or self.wants_region):
            return "the reference is too slow for its deadline"
        return "get_inputs() draws no numbers that can be changed"

    def answer(self, *cases: Case, exactly: bool = True) -> list[Case]:
        """Run the reference on cases, and in float64 where that is possible. Draw cases first that are not drawn.

        On a GPU the reference finishes all of them before the judge's own work begins, to save context switches.

        Args:
            cases: the cases. Cases with an answer are not run again.
            exactly: False for no outputs in float64.

        Returns:
            The cases with a valid answer. Only variants can be missing, because their inputs can be outside the
            problem's domain. A variant is valid only if the reference in float64 agrees, and if its output is stable
            when the inputs change by less than a rounding error. Otherwise a correct kernel could give another output.
            If no float64 is possible, a variant within the range of the problem's own numbers is valid if the
            reference's own output is stable.

        Raises:
            EvaluationEnded: see :meth:`.CaseCache.first`. Only a given case or a process that has ended raises it.
        """
        answered = [case for case in cases if case.outputs]
        if self.cache.is_roomy:
            self.cache.draw_missing(cases)
        results: list[_Answer] = []
        together: list[Case] = []
        for case in cases:
            if case in answered or (case.kind in (*KINDS, LARGER) and not self.oracle.is_useful):
                continue
            if case.kind != GIVEN and self.cache.is_late:
                continue
            # Other slots' work lengthens forwards, so the shortest of several counts. Small inputs take no long one.
            if case.kind == LARGER and not self.cache.is_roomy and self.forward_s >= self.bounds.larger_s:
                continue
            try:
                if case.slot is None and not self.cache.draw([case]):
                    continue
                # Answers that take long, or of an unknown form, are not asked for in one batch.
                if self.cache.is_roomy and self.case is not None and self._is_quick:
                    together.append(case)
                else:
                    results += self._ask_together([case], exactly=exactly)
            except EvaluationEnded:
                if case.kind == GIVEN or self.process.ended is not None:
                    raise
        results += self._ask_together(together, exactly=exactly)
        self._inspect(results)
        for answer in results:
            if self._accept(answer):
                answered.append(answer.case)
            else:
                answer.case.outputs, answer.case.exact = [], None
        self.cache.leave(cases)
        return [case for case in cases if case in answered]

    def sharpen(self, cases: Sequence[Case]) -> None:
        """Compute float64 outputs of given cases that have an answer. See :meth:`.Oracle.sharpen`."""
        if self._is_quick:
            self.oracle.sharpen(cases)

    def _ask_together(self, cases: Sequence[Case], *, exactly: bool) -> list[_Answer]:
        """Answer cases in one batch, without a round trip for each."""
        questions: list[Question] = []
        wide = 0
        for case in cases:
            beside = self._beside(case, wide) if exactly else []
            wide += sum(question.ask.wide for question in beside)
            questions += [Question.of(case, leaves=self.cache.leaves and not beside), *beside]
        begun = time.perf_counter()
        replies = self.proxy.ask(questions)
        if len(questions) == 1:
            self.forward_s = min(self.forward_s, time.perf_counter() - begun)
        self.oracle.charge(wide)
        results: list[_Answer] = []
        for question, reply in zip(questions, replies, strict=True):
            case, ask = question.case, question.ask
            if not (ask.wide or ask.nudge):
                try:
                    if isinstance(reply, EvaluationEnded):
                        raise reply
                    results.append(self._check_form(case, reply))
                except EvaluationEnded:
                    if case.kind == GIVEN:
                        raise
            elif results and results[-1].case is case:
                if not ask.wide:
                    results[-1].moved = self._of_same_form(reply)
                elif ask.nudge:
                    results[-1].nudged = self.oracle.check(reply)
                else:
                    results[-1].exact = self.oracle.check(reply)
        return results

    def _beside(self, case: Case, wide: int) -> list[Question]:
        """Return the questions whose answers show whether an answer to the case is reliable."""
        # In 16 bits a change by one rounding error is larger than a kernel's tolerance.
        can_nudge = self._is_fp32 and self.cache.is_roomy and case.kind not in (GIVEN, *KINDS)
        needs_exact = case.kind in (*KINDS, LARGER) or (case.kind != GIVEN and not self._is_fp32)
        exact = self.oracle.questions(case, wide) if self._is_quick or needs_exact else []
        if case.kind == LARGER and self._precision is Precision.FP32:
            return [*exact, Question.of(case, _NUDGE, is_relative=True)]
        return exact or ([Question.of(case, _NUDGE)] if can_nudge else [])

    def _of_same_form(self, reply: Reply | EvaluationEnded) -> Reply | None:
        """Return a reply if its form is the first outputs' form."""
        form = self.form.structure, self.form.output_specs
        return reply if isinstance(reply, Reply) and (reply.structure, reply.tensors) == form else None

    def _check_form(self, case: Case, reply: Reply) -> _Answer:
        """Check the form of an answer, and record the form of the first one."""
        if not self.form.structure:
            self._learn_form(reply)
        elif (reply.structure, reply.tensors) != (self.form.structure, self.form.output_specs):
            raise invalid_problem(f"{UNSTEADY_FORM}: {_difference(reply, self.form)}")
        self.case = self.case or case
        self.form.differentiates |= reply.differentiates
        if reply.drew:
            self.form.draws = True
            self.oracle.is_useful = False  # In float64 its random numbers would differ.
        return _Answer(case, reply)

    def _learn_form(self, reply: Reply) -> None:
        """Check and record the form of the first outputs."""
        structure, specs = reply.structure, reply.tensors
        try:
            found = (*paths(structure), *self.form.gradient_names)
        except ValueError:
            found = ()
        returned = len(found)
        # A model that changes its inputs can return None.
        if not returned <= len(specs) <= MAX_TENSORS or not specs or (not returned and structure != "None"):
            raise invalid_problem(
                f"the reference must return 1 to {MAX_TENSORS} dense tensors, alone or with None in tuples, lists,"
                f" dicts with keys of str or int, and dataclasses. It returned {structure}"
            )
        if len(structure.encode()) >= MAX_STRUCTURE_BYTES:
            raise invalid_problem(
                f"the arrangement of the reference's outputs takes more than {MAX_STRUCTURE_BYTES} bytes to describe"
            )
        if any(spec.device != self.device or len(spec.shape) > MAX_DIMS or spec.dtype is None for spec in specs):
            raise invalid_problem(f"the reference's outputs must be dense tensors on {self.device} of known dtypes")
        changed, inputs = reply.locations[returned:], self.cache.input_specs
        if any(
            not 0 < location.index <= len(inputs) or inputs[location.index - 1] != spec
            for location, spec in zip(changed, specs[returned:], strict=True)
            if location.index != LASTING  # LASTING marks buffers.
        ):
            raise invalid_problem("the reference reported a changed input that is no input")
        self.proxy.check_size(specs, "Model.forward")
        outputs, own = returned - len(self.form.gradient_names), static.tolerance(self.proxy.source)
        for given in (self.settings.tolerances, own if isinstance(own, tuple) else None):
            if given is not None and len(given) != outputs:
                words = f"the list of tolerances has {len(given)} entries, and forward returns {outputs} tensors"
                raise invalid_problem(f"{words}: give one for each, in their order, or one for all")
        nbytes = sum(map(bytes_of, specs[:returned]))
        if self.checker is not None and (returned > checker.MOST or nbytes > checker.MOST_BYTES):
            most = f"{checker.MOST} tensors of {checker.MOST_BYTES} bytes in total"
            raise invalid_problem(
                f"a problem with check() can return {most}, and this one {returned} of {nbytes} bytes"
            )
        self.form.structure, self.form.output_specs, self.form.paths = structure, specs, found
        self.form.output_strides = tuple(tuple(location.stride) for location in reply.locations)
        indices = [location.index for location in reply.locations]
        self.form.output_aliases = tuple(index - 1 if 0 < index < LASTING else None for index in indices)
        self.form.memories = tuple(i - SHARED if i else number for number, i in enumerate(indices))
        self.form.lasting = tuple(i for i, index in enumerate(indices) if index == LASTING and i < self.form.returned)
        self.written_bytes = min(reply.written_bytes, sum(map(bytes_of, specs)))

    def _inspect(self, results: Sequence[_Answer]) -> None:
        """Compute the numbers by which answers are accepted, for all of them at once."""
        for answer in results:
            case = answer.case
            case.outputs = self._outputs(answer.reply)
            case.exact = self.oracle.tensors(answer.exact)
            case.again = functools.cache(functools.partial(self.again, case))
            case.moved = functools.partial(self._moved, case)
            moved = None if answer.moved is None else self._outputs(answer.moved)
            is_close_together = case.kind not in (*KINDS, LARGER, *ENDS) and self._precision is Precision.FP32
            answer.look = answers.Look(
                case.outputs,
                case.exact,
                self.oracle.tensors(answer.nudged) or moved,
                varied=case.kind != GIVEN,
                precision=self._precision,
                steady=_CLOSE_TOGETHER[case.exact is None] if is_close_together else 1.0,
                infinite=self._infinite,
            )
        answers.look_at([answer.look for answer in results if answer.look is not None])

    def _accept(self, answer: _Answer) -> bool:
        """Return whether an inspected answer is valid."""
        case, look = answer.case, answer.look
        assert look is not None
        # Variants of KINDS are compared with their own float64 outputs, other cases with the float64 outputs of all.
        has_own_exact = case.kind == GIVEN or case.kind in KINDS
        if not (self.oracle.is_useful if has_own_exact else self.oracle.is_related):
            case.exact = None
        if case.kind == GIVEN:
            if look.has_nan:
                raise invalid_problem(_NAN)
            if case.check is not None and (words := case.check(case, case.outputs)):
                raise invalid_problem(f"check() refuses the reference's own outputs: {words}")
            if case.exact is not None:
                self.oracle.relate(case, look)
            self._note(case)
            return True
        if case.check is not None:
            others = self.again(case, _CHECKED) if look.is_tame and not case.check(case, case.outputs) else None
            return others is not None and not case.check(case, others)
        if case.exact is not None and look.precision is not Precision.FP32:
            # In 16 bits an answer can be nearly constant, and its roundings vary more than its values.
            once = [exact.to(own.dtype) for exact, own in zip(case.exact, case.outputs, strict=False)]
            if isinstance(compare.check_each([(once, case)], self.settings)[0], EvaluationEnded):
                return False
        if case.kind == LARGER:
            case.exact = None  # The judge has no memory to compare with large float64 outputs.
            return look.exact is not None and look.is_precise and look.is_steady
        if case.kind in KINDS:
            return case.exact is not None and look.is_precise and look.is_steady
        # Other inputs are in the range of the problem's own values, so they count without float64 answers.
        if case.exact is None and case.kind in (*STEADY, *ENDS) and self.cache.is_roomy and not self._is_fp32:
            return False
        is_reliable = (case.exact is None or look.is_precise) and (look.nudged is None or look.is_steady)
        return look.is_tame and (is_reliable or (look.exact is not None and case.exact is None))

    def _note(self, case: Case) -> None:
        """Compare the outputs of a given case with the first case's outputs, by a sample of their values."""
        if case is self.case or self.case is None:
            self._some = [rounding.positions(tensor, _SAMPLE) for tensor in case.outputs]
            self._first = self._sampled(case.outputs)
            wide = [number for number, some in enumerate(self._first) if some.itemsize > 1]  # fp8 lacks the operation.
            self._infinite = [number for number in wide if bool(self._first[number].isinf().any())]
        elif not self._same or any(self._same):
            again, exact = case.again, None if case.exact is None else self._sampled(case.exact)
            some = replace(
                case,
                outputs=self._sampled(case.outputs),
                exact=exact,
                again=lambda: None if again is None or (found := again()) is None else self._sampled(found),
            )
            same = compare.same_outputs(self._first, some, self.settings)
            self._same = [all(both) for both in zip(same, self._same or same, strict=True)]

    def _sampled(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [values_at(tensor, some) for tensor, some in zip(outputs, self._some, strict=True)]

    def confirm_form(self, case: Case) -> None:
        """Answer a case again before a kernel's outputs are said to have another form than the reference's.

        Raises:
            EvaluationEnded: ``invalid_problem`` if the form of the reference's answer depends on the input.
        """
        if self.proxy.left_s >= 2 * self.forward_s and self.answer(case):
            self._check_form(case, self._call(case))

    def confirm(self, case: Case) -> None:
        """Draw and answer a case again before a kernel is called wrong on it.

        Raises:
            EvaluationEnded: ``invalid_problem`` if the inputs differ, or the outputs by more than a kernel's tolerance.
        """
        if self.proxy.left_s < 2 * self.forward_s:
            return
        self.answer(case)
        self._repeat(case, _REPEATS if self._is_quick and self.cache.is_roomy else 1)
        before = [checksum(tensor) for tensor in case.inputs]
        self.cache.drop([case])
        # A kernel that runs on the device at the same time must not use up the time for float64.
        self.oracle.left_s = math.inf
        try:
            self.answer(case)
        finally:
            self.oracle.reset_time()
        # A variant that cannot be drawn again is no one's fault.
        if case.inputs and [checksum(tensor) for tensor in case.inputs] != before:
            raise invalid_problem(UNSTEADY_INPUTS)

    def _repeat(self, case: Case, times: int) -> None:
        """Answer a case again, every other time with more threads. Raise ``invalid_problem`` if an answer differs."""
        for number in range(times):
            again = self._outputs(self._call(case, threads=None if number % 2 else 0))
            if compare.need_no_excuse([(again, case)], self.settings)[0]:
                continue
            try:
                compare.check_values(again, case, self.settings)
                if self.device == "cpu":
                    # One thread has no races: it repeats its answer, and its noise consists of rounding errors.
                    alone, twice = (self._outputs(self._call(case, threads=1)) for _ in range(2))
                    nudged = functools.partial(self.again, case, 4.0, threads=1)
                    for outputs, noise in ((twice, None), (case.outputs, nudged), (again, nudged)):
                        own = replace(case, outputs=alone, exact=None, again=noise)
                        compare.check_values(outputs, own, self.settings)
            except EvaluationEnded as ended:
                raise differing(ended) from None

    def outputs(
        self, case: Case, *, wide: bool = False, evaluates: bool = False, whole: bool = False
    ) -> list[torch.Tensor] | None:
        """Answer a held case once more, in float64 or in ``eval()`` mode, and release its earlier outputs.

        Returns:
            The outputs, with the buffers if ``whole``, or None if their form differs from the first outputs' form.
        """
        wide = wide and self.oracle.is_related
        reply = self._call(case, afresh=True, wide=wide, evaluates=evaluates)
        expected = self.oracle.specs if wide else self.form.output_specs
        if (reply.structure, reply.tensors) != (self.form.structure, expected):
            return None
        return self.proxy.tensors(expected, reply.locations, "Model.forward")[: None if whole else self.form.effects]

    def _moved(self, case: Case) -> Iterator[list[torch.Tensor]]:
        """Yield outputs to inputs changed by several rounding errors, which can pass a step of a gradient."""
        for _ in range(_MOVES):
            if (answer := self.again(case, _MOVED[self.settings.tf32 or not self._is_fp32])) is None:
                return
            yield answer

    def again(self, case: Case, times: float = 1.0, threads: int | None = None) -> list[torch.Tensor] | None:
        """Return the outputs to a held case's inputs changed by about a rounding error, or None if that fails."""
        if not case.outputs or self.is_hurried:
            return None
        nudge = times * (2.0**-10 if self.settings.tf32 else torch.finfo(DTYPES[self.settings.precision]).eps)
        try:
            reply = self._call(case, nudge, threads=threads)
            return self._outputs(reply) if self._of_same_form(reply) else None
        except EvaluationEnded:
            if self.process.ended is not None:
                raise
            return None

    def _call(self, case: Case, nudge: float = 0.0, **how: Any) -> Reply:
        if case.slot is None and not self.cache.draw([case]):
            raise invalid_problem(UNSTEADY_INPUTS)
        begun = time.perf_counter()
        [reply] = self.proxy.ask([Question.of(case, nudge, is_relative=nudge > 0, **how)])
        if isinstance(reply, EvaluationEnded):
            raise reply
        self.forward_s = min(self.forward_s, time.perf_counter() - begun)
        return reply

    def _outputs(self, reply: Reply) -> list[torch.Tensor]:
        return self.proxy.tensors(self.form.output_specs, reply.locations, "Model.forward")

    def digest(self, case: Case) -> str:
        """Return a hash of the bits of a case's outputs, without the buffers, which are a random choice."""
        bits = hashlib.sha256()
        for tensor in case.outputs[: self.form.effects]:
            if tensor.numel():
                bits.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return bits.hexdigest()

    @contextlib.contextmanager
    def timed(self, *, beside: bool = False) -> Generator[Exchange]:
        """Share the first case's inputs with the process for timed calls.

        ``beside`` is True if a kernel runs in turn with it. Without one, the process can have more memory.
        """
        case, exchange = self.case, self.proxy.exchange
        assert case is not None, "it has answered a case"
        if self.device == "cuda" and not beside:
            self.proxy.allow(self.timed_bytes)
        self.cache.present(case)
        with self.proxy.blaming("get_inputs()"):
            exchange.bind_inputs(case.inputs)
            if not self.cache.is_roomy:
                self.cache.drop([case])
            exchange.bind_outputs(self.form.output_specs)
        try:
            # A launch-overhead call delivers the outputs of the call before it, so there must be one.
            self.proxy.order(Order.RUN, what="Model.forward", seed=case.seed)
            yield exchange
        finally:
            exchange.unbind()
        with self.proxy.blaming("get_inputs()"):
            exchange.bind_inputs([])
        if not self.cache.is_roomy:
            self.cache.clear()


def differing(ended: EvaluationEnded) -> EvaluationEnded:
    """Return the end of an evaluation whose reference answers one input in two ways."""
    return invalid_problem(f"the reference's answers to one input differ: {ended.outcome.message}")


def _difference(reply: Reply, form: Form) -> str:
    """Return the difference between an answer's form and the first one's."""
    if reply.structure != form.structure:
        return f"{form.structure} at first, then {reply.structure}"
    pairs = zip(form.output_specs, reply.tensors, strict=False)
    first, then = next((pair for pair in pairs if pair[0] != pair[1]), (form.output_specs[0], reply.tensors[0]))
    return f"{first.dtype} of the shape {first.shape} at first, then {then.dtype} of {then.shape}"


@dataclass(slots=True)
class _Answer:
    """The reference's answer to a case, its float64 answer, and its answers to nudged inputs, in float64 or not."""

    case: Case
    reply: Reply
    exact: Reply | None = None
    nudged: Reply | None = None
    moved: Reply | None = None
    look: answers.Look | None = None
