"""The reference of a problem: the expected outputs of its cases.

Its parts are the proxy of its process, the cache of its cases, and the float64 oracle.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from kqueue.contract import Settings
from workers.judge.channel.bits import checksum
from workers.judge.channel.orders import Order
from workers.judge.channel.protocol import Reply
from workers.judge.channel.randomness import ANY_SIZE, KINDS
from workers.judge.channel.tensors import LASTING, MAX_DIMS, MAX_STRUCTURE_BYTES, MAX_TENSORS
from workers.judge.ending import EvaluationEnded
from workers.judge.forkserver.process import SealedProcess
from workers.judge.pipeline import answers, compare
from workers.judge.pipeline.blame import invalid_problem
from workers.judge.pipeline.case_cache import CaseCache
from workers.judge.pipeline.cases import GIVEN, Case
from workers.judge.pipeline.exchange import Exchange
from workers.judge.pipeline.oracle import COLD_S, Oracle
from workers.judge.pipeline.proxy import Question, ReferenceProxy, bytes_of

#: Number of forwards that the remaining time must allow before an optional forward is made.
_UNHURRIED: Final = 16


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on work beyond the given cases.

    Attributes:
        quick_s: longest forward in seconds for which the reference is also run in float64.
        exact_s: time in seconds for all float64 calls together.
        host_bytes: memory for one float64 call on a CPU. On a GPU a share of the process's allowance counts.
        varied_bytes: size of the largest inputs of which all variants are made. Larger inputs get the variants that
            exist for any size.
        arena_bytes: size of the largest arena, or 0 for none.
    """

    quick_s: float
    exact_s: float
    host_bytes: int
    varied_bytes: int
    arena_bytes: int


BOUNDS: Final = {
    "cuda": Bounds(quick_s=0.003, exact_s=0.2, host_bytes=0, varied_bytes=256 << 20, arena_bytes=128 << 20),
    "cpu": Bounds(quick_s=0.05, exact_s=1.0, host_bytes=512 << 20, varied_bytes=8 << 20, arena_bytes=0),
}


class Reference:
    """A problem's reference for one evaluation.

    Attributes:
        proxy, cache, oracle: the parts. They share the process, its settings and the form of its calls.
        written_bytes: bytes of the outputs that are neither inputs nor weights, reported by the process.
        forward_s: shortest time in seconds of a forward, measured by the judge.
        case: the first case that was answered.
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
        self._bounds = bounds or BOUNDS[device]
        self.proxy = ReferenceProxy(process, source, settings, device)
        self.cache = CaseCache(self.proxy, self._bounds.varied_bytes)
        self.oracle = Oracle(self.proxy, self._bounds.exact_s, self._bounds.host_bytes)
        self.process = process
        self.settings = settings
        self.device = device
        self.form = self.proxy.form
        self.written_bytes = 0
        self.forward_s = math.inf
        self.case: Case | None = None
        self.timed_bytes = 0
        self._same_answers: bool | None = None
        self._first_sums: list[int] = []

    @property
    def is_hurried(self) -> bool:
        """True if there is no time for optional calls."""
        return self.proxy.left_s < _UNHURRIED * self.forward_s or self.cache.is_slow

    @property
    def is_constant(self) -> bool:
        """True if the outputs for at least two given cases were all the same within the tolerance."""
        return self._same_answers is True

    @property
    def _is_quick(self) -> bool:
        """True if the reference is also run in float64."""
        return self.forward_s <= self._bounds.quick_s

    def answer_first(self, first: Case) -> None:
        """Answer the first case, which determines the form of a call's outputs."""
        # The first call loads and chooses kernels.
        self.answer(first)
        self.cache.plan(first)

    def more_cases(self, first: Case) -> list[Case]:
        """Return further given cases, as many as the settings request, each from a secret seed, and variants.

        Where all cases together would take too much memory, return only variants, which are not drawn yet.
        """
        cache = self.cache
        if not cache.is_roomy:
            kinds = ANY_SIZE if cache.varies_any_size else ()
            return [cache.new(kind, drawn=first.drawn, on_device=first.on_device) for kind in kinds]
        self.proxy.share_arena(min(cache.wanted_arena(), self._bounds.arena_bytes))
        given = cache.given(self.settings.checks - 1, on_device=first.on_device)
        if cache.is_slow:
            return given
        if cache.varies_any_size:
            return given + cache.vary(first, ANY_SIZE)
        return given + cache.vary(first, KINDS) if cache.varies and self.oracle.is_useful else given

    def answer(self, *cases: Case, exactly: bool = True) -> list[Case]:
        """Run the reference on cases, and in float64 where that is possible. Draw cases first that are not drawn.

        On a GPU the reference finishes all of them before the judge's own work begins, to save context switches.

        Args:
            cases: the cases. Cases with an answer are not run again.
            exactly: False for no outputs in float64.

        Returns:
            The cases with a valid answer. Only variants can be missing, because their inputs can be outside the
            problem's domain. A variant whose numbers differ from the problem's own is valid only if the reference in
            float64 agrees, and if its output is stable when the inputs change by less than a rounding error. Otherwise
            a correct kernel could give another output.

        Raises:
            EvaluationEnded: see :meth:`.CaseCache.first`. Only a given case or a process that has ended raises it.
        """
        answered = [case for case in cases if case.slot is not None and case.outputs]
        if self.cache.is_roomy:
            self.cache.draw_missing(cases)
        results: list[_Answer] = []
        together: list[Case] = []
        for case in cases:
            if case in answered or (case.kind in KINDS and not self.oracle.is_useful):
                continue
            try:
                if case.slot is None and not self.cache.draw([case]):
                    continue
                if self._can_batch(case, exactly=exactly):
                    together.append(case)
                else:
                    results.append(self._ask(case, exactly=exactly))
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
        return [case for case in cases if case in answered]

    def sharpen(self, cases: Sequence[Case]) -> None:
        """Compute float64 outputs of given cases that have an answer. See :meth:`.Oracle.sharpen`."""
        if self._is_quick:
            self.oracle.sharpen(cases)

    def _can_batch(self, case: Case, *, exactly: bool) -> bool:
        """Return whether a case can be answered in one batch, because its answer is quick and of a known form."""
        is_cold = exactly and self.oracle.is_cold(case)
        return self.cache.is_roomy and self.case is not None and self._is_quick and not is_cold

    def _ask_together(self, cases: Sequence[Case], *, exactly: bool) -> list[_Answer]:
        """Answer cases in one batch, without a round trip for each."""
        questions: list[Question] = []
        wide = 0
        for case in cases:
            exact = self.oracle.questions(case, wide) if exactly else []
            wide += len(exact)
            questions += [Question(case), *exact]
        begun = time.perf_counter()
        replies = self.proxy.ask(questions)
        if wide:
            self.oracle.charge(wide, (time.perf_counter() - begun) / len(questions))
        results: list[_Answer] = []
        for question, reply in zip(questions, replies, strict=True):
            case = question.case
            if not question.wide:
                try:
                    if isinstance(reply, EvaluationEnded):
                        raise reply
                    results.append(self._check_form(case, reply))
                except EvaluationEnded:
                    if case.kind == GIVEN:
                        raise
            elif results and results[-1].case is case:
                if question.nudge:
                    results[-1].nudged = self.oracle.check(reply)
                else:
                    results[-1].exact = self.oracle.check(reply)
        return results

    def _ask(self, case: Case, *, exactly: bool) -> _Answer:
        """Answer a case without inspecting its outputs."""
        reply = self._call(case)
        if self.device == "cuda" and self._bounds.quick_s < self.forward_s < COLD_S and self.case is None:
            reply = self._call(case, afresh=True)
        answer = self._check_form(case, reply)
        if exactly and self._is_quick:
            answer.exact = self.oracle.ask(case)
            if case.kind in KINDS and answer.exact is not None:
                answer.nudged = self.oracle.ask(case, nudged=True)
        return answer

    def _check_form(self, case: Case, reply: Reply) -> _Answer:
        """Check the form of an answer, and record the form of the first one."""
        if not self.form.structure:
            self._learn_form(reply)
        elif (reply.structure, reply.tensors) != (self.form.structure, self.form.output_specs):
            part = "structure" if reply.structure != self.form.structure else "shapes and dtypes"
            raise invalid_problem(f"the reference must return the same {part} each time")
        self.case = self.case or case
        if reply.drew:
            self.form.draws = True
            self.oracle.is_useful = False  # In float64 its random numbers would differ.
        return _Answer(case, reply)

    def _learn_form(self, reply: Reply) -> None:
        """Check and record the form of the first outputs."""
        structure, specs = reply.structure, reply.tensors
        if "?" in structure or not specs or structure.count("T") > MAX_TENSORS:
            raise invalid_problem(f"the reference must return 1 to {MAX_TENSORS} tensors, not {structure}")
        if len(structure.encode()) >= MAX_STRUCTURE_BYTES:
            raise invalid_problem(
                f"the arrangement of the reference's outputs takes more than {MAX_STRUCTURE_BYTES} bytes to describe"
            )
        if any(spec.device != self.device or len(spec.shape) > MAX_DIMS or spec.dtype is None for spec in specs):
            raise invalid_problem(f"the reference's outputs must be dense tensors on {self.device} of known dtypes")
        changed = reply.locations[structure.count("T") :]
        inputs = self.cache.input_specs
        if any(
            not 0 < location.index <= len(inputs) or inputs[location.index - 1] != spec
            for location, spec in zip(changed, specs[structure.count("T") :], strict=True)
        ):
            raise invalid_problem("the reference reported a changed input that is no input")
        self.proxy.check_size(specs, "Model.forward")
        self.form.structure, self.form.output_specs = structure, specs
        self.form.output_strides = tuple(tuple(location.stride) for location in reply.locations)
        indices = [location.index for location in reply.locations]
        self.form.output_aliases = tuple(index - 1 if 0 < index < LASTING else None for index in indices)
        self.form.lasting = tuple(i for i, index in enumerate(indices) if index == LASTING)
        self.written_bytes = min(reply.written_bytes, sum(map(bytes_of, specs)))

    def _inspect(self, results: Sequence[_Answer]) -> None:
        """Compute the numbers by which answers are accepted, for all of them at once."""
        for answer in results:
            case = answer.case
            case.outputs = self._outputs(answer.reply)
            case.exact = self.oracle.tensors(answer.exact)
            # The first case can be among these, and then comes first.
            first = self.case if case.kind == GIVEN and self._same_answers is not False else None
            answer.look = answers.Look(
                case.outputs,
                case.exact if case.kind == GIVEN or case.kind in KINDS else None,
                self.oracle.tensors(answer.nudged),
                first.outputs if first is not None and first is not case and first.outputs else None,
                varied=case.kind != GIVEN,
                precision=self.settings.precision,
            )
        answers.look_at([answer.look for answer in results if answer.look is not None])

    def _accept(self, answer: _Answer) -> bool:
        """Return whether an inspected answer is valid."""
        case, look = answer.case, answer.look
        assert look is not None
        # Variants of KINDS are compared with their own float64 outputs, given cases with the float64 outputs of all.
        has_own_exact = case.kind == GIVEN or case.kind in KINDS
        if not (self.oracle.is_useful if has_own_exact else self.oracle.is_related):
            case.exact = None
        if case.kind == GIVEN:
            if look.has_nan:
                raise invalid_problem("the reference's output holds NaN, so nothing can agree with it")
            if case.exact is not None:
                self.oracle.relate(case, look)
            self._note(case, look)
            return True
        if case.kind not in KINDS:
            return look.is_tame  # Such inputs are like the problem's own.
        return case.exact is not None and look.is_precise and look.is_steady

    def _note(self, case: Case, look: answers.Look) -> None:
        """Compare the outputs of a given case with the first case's outputs."""
        if case is self.case or self.case is None:
            self._first_sums = [checksum(tensor) for tensor in case.outputs]
        elif self._same_answers is not False and look.first is not None:
            self._same_answers = look.is_as_first
        elif self._same_answers is not False:
            self._same_answers = [checksum(tensor) for tensor in case.outputs] == self._first_sums

    def confirm(self, case: Case) -> None:
        """Draw and answer a case again before a kernel is called wrong on it.

        Raises:
            EvaluationEnded: ``invalid_problem`` if the inputs differ, or the outputs by more than a kernel's tolerance.
        """
        if self.proxy.left_s < 2 * self.forward_s:
            return
        self.answer(case)
        again = self._outputs(self._call(case))
        try:
            compare.check_values(again, case, self.settings)
        except EvaluationEnded as ended:
            raise invalid_problem(f"the reference's answers to one input differ: {ended.outcome.message}") from None
        del again
        before = [checksum(tensor) for tensor in case.inputs]
        self.cache.drop([case])
        # A kernel that runs on the device at the same time must not use up the time for float64.
        self.oracle.left_s = math.inf
        try:
            self.answer(case)
        finally:
            self.oracle.reset_time()
        # A variant that cannot be drawn again is no one's fault.
        if case.slot is not None and [checksum(tensor) for tensor in case.inputs] != before:
            raise invalid_problem("get_inputs() must return the same values when it is called under the same seeds")

    def outputs(self, case: Case, *, wide: bool = False) -> list[torch.Tensor] | None:
        """Answer a held case once more, in float64 if ``wide`` is set, and release its earlier outputs.

        Returns:
            The outputs, or None if their form differs from the first outputs' form.
        """
        wide = wide and self.oracle.is_related
        reply = self._call(case, afresh=True, wide=wide)
        expected = self.oracle.specs if wide else self.form.output_specs
        if (reply.structure, reply.tensors) != (self.form.structure, expected):
            return None
        return self.proxy.tensors(expected, reply.locations, "Model.forward")

    def _call(self, case: Case, *, afresh: bool = False, wide: bool = False) -> Reply:
        begun = time.perf_counter()
        [reply] = self.proxy.ask([Question(case, wide=wide, afresh=afresh)])
        if isinstance(reply, EvaluationEnded):
            raise reply
        self.forward_s = min(self.forward_s, time.perf_counter() - begun)
        return reply

    def _outputs(self, reply: Reply) -> list[torch.Tensor]:
        return self.proxy.tensors(self.form.output_specs, reply.locations, "Model.forward")

    def digest(self, case: Case) -> str:
        """Return a hash of the bits of a case's outputs."""
        bits = hashlib.sha256()
        for tensor in case.outputs:
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


@dataclass(slots=True)
class _Answer:
    """The reference's answer to a case, its float64 answer, and its float64 answer to nudged inputs."""

    case: Case
    reply: Reply
    exact: Reply | None = None
    nudged: Reply | None = None
    look: answers.Look | None = None
