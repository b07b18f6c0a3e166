"""The reference as the judge sees it: a sealed process that draws inputs and answers them.

The problem's source runs there and nowhere else. The judge gives seeds and takes tensors, checks each reply against
what a problem may be, and copies what it keeps into memory of its own. Failures of the process are the problem's; the
fleet's, if somebody else killed it.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import mmap
import os
import re
import secrets
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from kqueue.categories import Blame, Category
from kqueue.contract import Comparison, Phase, Precision, Settings
from workers.judge.channel import sheet
from workers.judge.channel.arguments import FORM, ArgumentsError, check
from workers.judge.channel.flags import memory
from workers.judge.channel.gpu_memory import CudaCallError
from workers.judge.channel.protocol import (
    MAX_DIMS,
    MAX_EXPORTED,
    MAX_STRUCTURE_BYTES,
    MAX_TENSORS,
    Answer,
    Draw,
    Job,
    Order,
    Reply,
    Tag,
    TensorSpec,
    Where,
)
from workers.judge.channel.randomness import KINDS, set_seed
from workers.judge.ending import EvaluationEnded
from workers.judge.host import linux
from workers.judge.keeper.process import SealedProcess
from workers.judge.trial import compare, static
from workers.judge.trial.cases import CLOSE, DTYPES, GIVEN, Case, distance, is_tame, moved, size, widened
from workers.judge.trial.exchange import Exchange, Form, await_opening

#: Input sets that are drawn at once, and what they may take, in bytes. On a GPU each order costs turns on its
#: processors, which small problems would feel.
_MOST_SETS: Final = 8
_AHEAD_BYTES: Final = 64 << 20
#: The share of the reference's time that is left which drawing one input set may take, for variants to be made: that
#: takes at least six such draws, and a few dozen at most.
_VARIED_SHARE: Final = 1 / 100
#: Inputs whose variants are drawn on a CPU in a few milliseconds, in bytes: a GPU need not be asked.
_QUICK_BYTES: Final = 8 << 20
#: What a reference does with values whose domain is checked on the device, or that it takes for indices: values
#: unlike its own could end in an assertion there, which nothing survives that uses the device.
_BOUND_TO_ITS_INPUTS: Final = re.compile(
    r"BCELoss|binary_cross_entropy(?!_with_logits)|multinomial|bernoulli|poisson|\.(long|int|short|byte)\("
    r"|torch\.(u?int\d*|long|short)\b"
)
#: What of a first call goes into loading a GPU's kernels, at most, in seconds.
_COLD_S: Final = 0.5
#: The share of a GPU's free memory that the reference in float64 may take.
_MEMORY_SHARE: Final = 1 / 8
#: How far the reference may lie from itself in float64, as a share of its size: for that to tell anything, and for
#: a variant to count.
_RELATED: Final = {Precision.FP32: 1e-2, Precision.FP16: 0.25, Precision.BF16: 0.25}
_PRECISE: Final = {Precision.FP32: 1e-3, Precision.FP16: 3e-2, Precision.BF16: 3e-2}
#: Changes of a value that no kernel need tell from none.
_ROUNDING: Final = {Precision.FP32: 2**-25, Precision.FP16: 2**-15, Precision.BF16: 2**-12}
#: The share of a host's memory that the tensors of one call may take on a CPU: judge and candidate have copies.
_HOST_SHARE: Final = 1 / 8
_OUT_OF_MEMORY: Final = 2  # cudaErrorMemoryAllocation
#: How long a process may take to give memory back before it is kept, in seconds.
_REST_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """What may be spent on more than the given cases.

    Attributes:
        quick_s: the reference in float64 is run only where a forward took less than this, in seconds.
        exact_s: how long it may take, all calls together, in seconds.
        kept_bytes: how much of its outputs is kept.
        host_bytes: how much memory one call of it may take on a CPU; on a GPU a share of the free memory counts.
        varied_bytes: the largest inputs of which variants are made.
    """

    quick_s: float
    exact_s: float
    kept_bytes: int
    host_bytes: int
    varied_bytes: int


BOUNDS: Final = {
    "cuda": Bounds(quick_s=0.003, exact_s=0.1, kept_bytes=2 << 30, host_bytes=0, varied_bytes=256 << 20),
    "cpu": Bounds(quick_s=0.05, exact_s=1.0, kept_bytes=256 << 20, host_bytes=512 << 20, varied_bytes=8 << 20),
}


class Reference:
    """A problem's reference in its sealed process, for one evaluation.

    Attributes:
        process: the process.
        exchange: what is shared with it, for its calls and their timing.
        form: of the problem's calls; it becomes known with the first case and the first answer.
        init_inputs: the constructor's arguments, as ``get_init_inputs()`` made them.
        written_bytes: bytes of the outputs that are neither inputs nor weights; the process tells.
        forward_s: the shortest that a forward took, as the judge saw it, in seconds.
        left_s: seconds that are left of the reference's deadline.
        case: the first case that was answered.
        output_specs: of the outputs.
        memory_fraction: the share of the GPU's memory that the process may take.
    """

    def __init__(
        self,
        process: SealedProcess,
        source: str,
        settings: Settings,
        device: str,
        bounds: Bounds | None = None,
        *,
        memory_fraction: float = 1.0,
    ) -> None:
        """Take a process that runs nothing yet.

        Args:
            process: a reference's, freshly forked or taken over.
            source: the problem's.
            settings: the evaluation's.
            device: ``cpu`` or ``cuda``.
            bounds: of what may be spent on exact answers and variants; None for the device's.
            memory_fraction: the share of the GPU's memory that the process may take.
        """
        self.memory_fraction = memory_fraction
        self._bounds = bounds or BOUNDS[device]
        self.process = process
        self.settings = settings
        self.device = device
        self.dtype = DTYPES[settings.precision]
        self.form = Form()
        self.exchange = _Exchange(process, self.form, device)
        self.init_inputs: list[Any] | dict[str, Any] = []
        self.written_bytes = 0
        self.forward_s = math.inf
        self.left_s = settings.deadlines.reference_s
        self.case: Case | None = None
        self._source = source
        self._tolerance = static.tolerance(source)
        self._opening = 0
        self._on_device: bool | None = None
        #: What drawing one input set took, in seconds.
        self._draw_s = 0.0
        #: How many input sets are drawn at once, and those that are not used yet.
        self._sets = 1
        self._ready: list[Case] = []
        self._exchange_wide = _Exchange(process, self.form, device, wide=True)
        self._is_wide_bound = False
        #: Whether the model in float64 may be of use.
        self._has_wide = False
        self._wide_left = self._bounds.exact_s
        self._wide_cold = device == "cuda"
        self._kept = 0
        self._may_vary = _BOUND_TO_ITS_INPUTS.search(source) is None
        self._same_answers: bool | None = None
        self._specs: tuple[TensorSpec, ...] = ()
        self.output_specs: tuple[TensorSpec, ...] = ()
        descriptor = memory("kqueue-sheet", sheet.SIZE)
        self._page = mmap.mmap(descriptor, sheet.SIZE, prot=mmap.PROT_READ)
        self._sheet: int | None = descriptor

    def begin(self) -> None:
        """Have the process open the device, and do not wait for it."""
        job = Job(
            source=self._source,
            entry="Model",
            device=self.device,
            dtype=self.dtype,
            keeps_float64=self.settings.keeps_float64,
            seed=self.settings.seed,
            memory_fraction=self.memory_fraction,
            # Streams of its own would wait for one another.
            one_queue="Stream" not in self._source,
        )
        self._opening = self.process.send(Order.OPEN, payload=job)

    def load(self) -> None:
        """Import the problem.

        Raises:
            EvaluationEnded: ``invalid_problem``, ``reference_error`` or ``reference_timeout``.
            ForkServerError: the process could not be made ready.
        """
        await_opening(self.process, self._opening)
        self._order(Order.LOAD, what="importing the problem")

    def construct(self) -> None:
        """Have the model constructed on the device, under the seed that the candidate will have too.

        Raises:
            EvaluationEnded: as :meth:`load`.
        """
        assert self._sheet is not None, "a reference is constructed once"
        try:
            self._order(Order.INITIAL, what="get_init_inputs()", fds=(self._sheet,))
        finally:
            os.close(self._sheet)
            self._sheet = None
        self.init_inputs = self._read("get_init_inputs()", (list, dict))
        self._order(Order.CONSTRUCT, what="Model(*get_init_inputs())", payload=self.init_inputs)

    def widen(self) -> None:
        """Have a copy of the model made in float64, if it can be had."""
        with contextlib.suppress(EvaluationEnded):
            self._order(Order.WIDEN, what="the model in float64", optional=True)
            self._has_wide = True

    def make_cases(self, most_bytes: float = math.inf) -> list[Case]:
        """Return as many given cases as the settings ask for, each from a seed that nobody else knows, and variants.

        Args:
            most_bytes: what the inputs may take; where they would take more only the first case is made.

        Raises:
            EvaluationEnded: ``invalid_problem``, ``reference_error`` or ``reference_timeout``.
        """
        given = self._draw(1, on_device=False)
        nbytes = sum(tensor.nbytes for tensor in given[0].inputs)
        if self.settings.checks * nbytes > most_bytes:
            return given
        while (missing := self.settings.checks - len(given)) > 0:
            given += self._draw(missing, on_device=False)
        # An evaluation's own tolerance was chosen for the given inputs.
        wanted = self.settings.comparison is Comparison.STRICT and self.settings.tolerance is None
        varies = wanted and self._may_vary and self._has_wide and self._draw_s <= _VARIED_SHARE * self.left_s
        return given + self._vary(given[0]) if varies and nbytes <= self._bounds.varied_bytes else given

    def _vary(self, case: Case) -> list[Case]:
        """Return the variants of a given case, as many as there are."""
        made: list[Case] = []
        on_device = sum(tensor.nbytes for tensor in case.inputs) > _QUICK_BYTES and self._may_draw_on_device()
        try:
            for begin in range(0, len(KINDS), self._sets):
                kinds = KINDS[begin : begin + self._sets]
                self._order(Order.DRAW, what="get_inputs()", payload=Draw((case.drawn,) * len(kinds), on_device, kinds))
                there = self._read("get_inputs()", list)
                with self._blaming("get_inputs()"):
                    every = self.exchange.inputs(len(kinds))
                made += [
                    Case(secrets.randbits(63), inputs, [], kind=kind, tolerance=self._tolerance)
                    for kind, inputs, is_there in zip(kinds, every, there, strict=False)
                    if is_there is True
                ]
        except EvaluationEnded:
            if self.process.ended is not None:
                raise
        return made

    def fresh(self) -> Case:
        """Return one more input set, unanswered, drawn on the device itself where the problem's code allows.

        Raises:
            EvaluationEnded: as :meth:`make_cases`.
        """
        if not self._ready:
            self._ready += self._draw(self._sets, on_device=self._may_draw_on_device())
        return self._ready.pop()

    def again(self, drawn: int, seed: int) -> Case:
        """Return the case that was drawn under a seed before; ``seed`` is its forward's."""
        [case] = self._draw(1, on_device=False, seeds=(drawn,))
        case.seed = seed
        return case

    def _may_draw_on_device(self) -> bool:
        """Return whether ``get_inputs()`` makes the same kind of inputs with the GPU as torch's default device."""
        if self._on_device is None:
            self._on_device = self.device == "cuda"
            try:
                if self._on_device:
                    self._draw(1, on_device=True)
            except EvaluationEnded:
                self._on_device = False
                if self.process.ended is not None:
                    raise
        return self._on_device

    def _draw(self, most: int, *, on_device: bool, seeds: tuple[int, ...] = ()) -> list[Case]:
        """Have input sets drawn, as many as fit and at most ``most``, and copy them into memory of the judge's own."""
        seeds = seeds or tuple(secrets.randbits(63) for _ in range(min(most, self._sets)))
        begun = time.monotonic()
        reply = self._order(Order.DRAW, what="get_inputs()", payload=Draw(seeds, on_device))
        self._draw_s = (time.monotonic() - begun) / len(seeds)
        arguments = self._read("get_inputs()", (list, dict))
        try:
            if check(arguments) != len(reply.tensors):
                raise ArgumentsError("another number of tensors than it told of")
        except ArgumentsError as error:
            raise _invalid(f"{FORM}; it returned {error}") from None
        if any(spec.dtype is None or len(spec.shape) > MAX_DIMS for spec in reply.tensors):
            raise _invalid(f"at most {MAX_TENSORS} dense input tensors of {MAX_DIMS} dimensions and known dtypes")
        self._check_size(reply.tensors, "get_inputs()")
        if self.form.arguments is None:
            self.form.arguments, self._specs = arguments, reply.tensors
            self._bind()
            self._order(Order.TAKE, what="get_inputs()")
        elif (
            reply.answer is Answer.MISMATCH
            or repr(arguments) != repr(self.form.arguments)
            or reply.tensors != self._specs
        ):
            raise _invalid("get_inputs() must return the same shapes, dtypes and scalars each time")
        with self._blaming("get_inputs()"):
            every = self.exchange.inputs(len(seeds))
        return [
            Case(secrets.randbits(63), inputs, [], drawn=seed, tolerance=self._tolerance)
            for seed, inputs in zip(seeds, every, strict=True)
        ]

    def _bind(self) -> None:
        """Share inputs of the form that is known now, as many sets as are drawn at once from now on."""
        nbytes = sum(_nbytes(spec) for spec in self._specs)
        self._sets = max(1, min(_MOST_SETS, _AHEAD_BYTES // max(nbytes, 1), MAX_EXPORTED // max(len(self._specs), 1)))
        with self._blaming("get_inputs()"):
            like = [torch.empty(spec.shape, dtype=spec.dtype, device=self.device) for spec in self._specs]
            self.exchange.bind_inputs(like, sets=self._sets)

    def answer(self, case: Case) -> bool:
        """Run the reference on a case and keep its outputs, and those of the reference in float64 where it may.

        Returns:
            True if it answered. False only for a variant: its inputs may lie outside the problem's domain. It
            counts only if the reference in float64 agrees, and stays where it was when the inputs change by less
            than a rounding error: else a right kernel could answer otherwise.

        Raises:
            EvaluationEnded: as :meth:`make_cases`; for given cases only, or when the process has ended.
        """
        if case.kind == GIVEN:
            self._add_exact(case, drew=self._answer(case))
            self._note(case)
            return True
        if not self._has_wide:
            return False
        try:
            drew = self._answer(case)
        except EvaluationEnded:
            if self.process.ended is not None:
                raise
            return False
        self._add_exact(case, drew=drew)
        return case.exact is not None and self._is_steady(case, case.exact)

    def confirm(self, case: Case) -> None:
        """Answer a case again, before a kernel is called wrong on it.

        Raises:
            EvaluationEnded: ``invalid_problem`` if the answers differ by more than a kernel's may.
        """
        if self.left_s < 2 * self.forward_s:
            return
        again = Case(case.seed, case.inputs, [])
        self._answer(again)
        try:
            compare.check_values(again.outputs, case, self.settings)
        except EvaluationEnded as ended:
            raise _invalid(f"the reference's answers to one input differ: {ended.outcome.message}") from None

    def allow_exact(self) -> None:
        """Give float64 answers as much time again as they had at first."""
        self._wide_left = self._bounds.exact_s

    @property
    def is_constant(self) -> bool:
        """True if the answers to all given cases, at least two, were the same within the tolerance."""
        return self._same_answers is True

    def digest(self, case: Case) -> str:
        """Return a hash of the bits of a case's answer."""
        bits = hashlib.sha256()
        for tensor in case.outputs:
            if tensor.numel():
                bits.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return bits.hexdigest()

    def _answer(self, case: Case) -> bool:
        """As :meth:`answer`, without the float64 reference; return whether the forward drew random numbers."""
        reply = self._call(self.exchange, case)
        if self.device == "cuda" and self._bounds.quick_s < self.forward_s < _COLD_S and self.case is None:
            reply = self._call(self.exchange, case)
        if not self.form.structure:
            reply = self._learn_form(reply)
        elif (reply.structure, reply.tensors) != (self.form.structure, self.output_specs):
            what = "structure" if reply.structure != self.form.structure else "shapes and dtypes"
            raise _invalid(f"the reference must return the same {what} each time")
        with self._blaming("Model.forward"):
            case.outputs = self.exchange.snapshot(self.exchange.outputs(reply))
        if any(leaf.is_floating_point() and bool(torch.isnan(leaf).any()) for leaf in case.outputs):
            raise _invalid("the reference's output holds NaN, so nothing can agree with it")
        self.form.mutates_inputs |= self.exchange.changed(case.inputs) is not None
        return reply.drew

    def _call(self, exchange: Exchange, case: Case) -> Reply:
        exchange.load(case.inputs)
        exchange.settle()
        begun = time.perf_counter()
        reply = self._order(Order.RUN, what="Model.forward", seed=case.seed)
        self.forward_s = min(self.forward_s, time.perf_counter() - begun)
        return reply

    def _learn_form(self, reply: Reply) -> Reply:
        """Check the form of the first outputs, and have them delivered."""
        structure, specs = reply.structure, reply.tensors
        if "?" in structure or not specs or structure.count("T") > MAX_TENSORS:
            raise _invalid(f"the reference must return 1 to {MAX_TENSORS} tensors, not {structure}")
        if len(structure.encode()) >= MAX_STRUCTURE_BYTES:
            raise _invalid(
                f"the arrangement of the reference's outputs takes more than {MAX_STRUCTURE_BYTES} bytes to tell"
            )
        if any(spec.device != self.device or len(spec.shape) > MAX_DIMS or spec.dtype is None for spec in specs):
            raise _invalid(f"the reference's outputs must be dense tensors on {self.device} of known dtypes")
        self._check_size(specs, "Model.forward")
        self.form.structure, self.output_specs = structure, specs
        with self._blaming("Model.forward"):
            self.exchange.bind_outputs(specs)
        drew = reply.drew
        reply = self._order(Order.DELIVER, what="Model.forward")
        if reply.answer is Answer.MISMATCH or reply.tensors != specs:
            raise _invalid("the reference must return the same structure each time")
        self.form.output_aliases = tuple(place.index if place.where is Where.INPUT else None for place in reply.places)
        self.written_bytes = min(reply.written_bytes, sum(_nbytes(spec) for spec in specs))
        return Reply(
            reply.answer,
            reply.sequence,
            structure=reply.structure,
            tensors=reply.tensors,
            places=reply.places,
            drew=drew,
        )

    def _note(self, case: Case) -> None:
        """Compare the answer to a given case with that to the first."""
        if self.case is None:
            self.case = case
        elif self._same_answers is not False:
            share = CLOSE[self.settings.precision]
            pairs = zip(case.outputs, self.case.outputs, strict=True)
            self._same_answers = all(distance(a, b) <= share * size(b) for a, b in pairs)

    def _add_exact(self, case: Case, *, drew: bool) -> None:
        """Keep the float64 reference's outputs, if they can be had in time and memory and are the same function's."""
        if drew:
            self._has_wide = False  # its random numbers are others in float64
        if self.forward_s > self._bounds.quick_s:
            return
        exact = self._run_wide(case.seed, case.inputs)
        if exact is None:
            return
        related = self._is_precise(case, exact) if case.kind != GIVEN else self._is_related(case, exact)
        if related:
            case.exact = exact
            self._kept += sum(tensor.nbytes for tensor in exact)
        elif case.kind == GIVEN:
            self._has_wide = False

    def _is_related(self, case: Case, exact: list[torch.Tensor]) -> bool:
        """Return whether the outputs are a less precise form of the exact ones, be they rounding errors only."""
        share, close = _RELATED[self.settings.precision], CLOSE[self.settings.precision]
        return all(
            (apart := distance(own, wide)) <= share * size(wide) or apart <= close * own.numel() ** 0.5
            for own, wide in zip(case.outputs, exact, strict=True)
            if own.is_floating_point() or own.is_complex()
        )

    def _is_precise(self, case: Case, exact: list[torch.Tensor]) -> bool:
        """Return whether the outputs for a variant are near the exact ones, and far from overflowing."""
        share = _PRECISE[self.settings.precision]
        return all(
            # Not so indices: those of equal values may be any.
            (own.is_floating_point() or own.is_complex()) and is_tame(own) and distance(own, wide) <= share * size(wide)
            for own, wide in zip(case.outputs, exact, strict=True)
        )

    def _is_steady(self, case: Case, exact: list[torch.Tensor]) -> bool:
        """Return whether inputs that differ by less than a rounding error have the same answer; not so at steps."""
        rounding, close = _ROUNDING[self.settings.precision], CLOSE[self.settings.precision]
        set_seed(secrets.randbits(63))
        nudged = self._run_wide(case.seed, [moved(tensor, rounding) for tensor in case.inputs])
        if nudged is None:
            return False
        pairs = [(a, b, b.abs()) for a, b in zip(nudged, exact, strict=True) if b.numel()]
        return all(
            bool(((a - b).abs() <= close * (b_size + b_size.square().mean().sqrt())).all()) for a, b, b_size in pairs
        )

    def _run_wide(self, seed: int, inputs: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return the float64 reference's answer; None where it cannot, or would take too much memory or time."""
        if not self._has_wide:
            return None
        numbers = sum(tensor.numel() for tensor in inputs) + sum(math.prod(s.shape) for s in self.output_specs)
        if self._wide_left <= 0 or self._kept > self._bounds.kept_bytes or not self._fits(4 * 8 * numbers):
            return None
        begun = time.perf_counter()
        try:
            if not self._is_wide_bound:
                self._bind_wide(inputs)
            self._exchange_wide.load(inputs)
            self._exchange_wide.settle()
            reply = self._order(Order.RUN, what="the model in float64", seed=seed, wide=True, optional=True)
            exact = self._exchange_wide.snapshot(self._exchange_wide.outputs(reply))
        except EvaluationEnded:
            self._has_wide = False  # the problem was not written for float64
            if self.process.ended is not None:
                raise
            return None
        took = time.perf_counter() - begun
        self._wide_left -= max(0.0, took - _COLD_S) if self._wide_cold else took
        self._wide_cold = False
        return exact

    def _bind_wide(self, inputs: list[torch.Tensor]) -> None:
        with self._blaming("the model in float64", optional=True):
            self._exchange_wide.bind_inputs(
                [torch.empty(tensor.shape, dtype=widened(tensor.dtype), device=self.device) for tensor in inputs]
            )
            specs = [TensorSpec(widened(_dtype(s)), s.shape, s.device) for s in self.output_specs]
            self._exchange_wide.bind_outputs(specs)
        self._is_wide_bound = True

    def _fits(self, nbytes: int) -> bool:
        """Return whether so much may be taken of the memory that is left."""
        if self.device == "cuda":
            unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            return nbytes < _MEMORY_SHARE * (torch.cuda.mem_get_info()[0] + unused)
        return nbytes < self._bounds.host_bytes

    def _check_size(self, specs: Sequence[TensorSpec], what: str) -> None:
        """Refuse tensors of an impossible shape, or larger than the judge can hold a few copies of."""
        if any(size < 0 for spec in specs for size in spec.shape):
            raise _invalid(f"{what} told of a tensor of an impossible shape")
        nbytes = sum(math.prod(max(size, 1) for size in spec.shape) * _dtype(spec).itemsize for spec in specs)
        if self.device == "cuda":
            most = int(self.memory_fraction * torch.cuda.get_device_properties(0).total_memory)
        else:
            most = min(self.settings.limits.host_memory_bytes, int(_HOST_SHARE * linux.physical_bytes()))
        if nbytes > most:
            message = f"{what} makes tensors of {nbytes} bytes; at most {most} are possible here"
            raise EvaluationEnded(Category.REFERENCE_ERROR, message, Phase.REFERENCE)

    def _read(self, what: str, kind: type | tuple[type, ...]) -> Any:
        try:
            told = sheet.decode(self._page)
        except sheet.SheetError as error:
            raise EvaluationEnded(Category.REFERENCE_ERROR, f"{what}: {error}", Phase.REFERENCE) from None
        if not isinstance(told, kind):
            raise EvaluationEnded(Category.REFERENCE_ERROR, f"{what} told {type(told).__name__}", Phase.REFERENCE)
        return told

    def _order(self, order: Order, *, what: str, optional: bool = False, **arguments: Any) -> Reply:
        """Give an order within the reference's deadline."""
        if self.process.phase is not Phase.REFERENCE:
            self.process.enter(Phase.REFERENCE, self.left_s)
        waited_s = self.process.waited_s
        try:
            with self._blaming(what, optional=optional):
                return self.process.order(order, **arguments)
        finally:
            self.left_s = max(self.left_s - (self.process.waited_s - waited_s), 0.001)

    def _blaming(self, what: str, *, optional: bool = False) -> contextlib.AbstractContextManager[None]:
        return blaming_the_problem(what, self.process, self.memory_fraction, optional=optional)

    def renew(self) -> None:
        """Give a process that was taken over all the time that a new one has."""
        self.left_s = self.settings.deadlines.reference_s
        self.process.enter(Phase.REFERENCE, self.left_s)
        self.process.allow_compilers(self.settings.deadlines.compile_s)

    def keep(self, key: str, memo: dict[str, Any]) -> None:
        """Leave the process to a later evaluation of the same problem and settings.

        Raises:
            EvaluationEnded: it did not come to rest.
            ForkServerError: the fork server is gone.
        """
        self.process.enter(Phase.CLEANUP, _REST_S)
        self.process.allow_compilers(0.0)
        self.process.order(Order.REST)
        self.process.keep(key, memo)


class _Exchange(Exchange):
    """What is shared with a reference: its outputs may be views of whatever they like."""

    def may_alias(self, output: int, number: int) -> bool:
        del output, number
        return True


@contextlib.contextmanager
def blaming_the_problem(
    what: str, process: SealedProcess, memory_fraction: float, *, optional: bool = False
) -> Generator[None]:
    """Make what fails in a process that runs a problem the problem's failure, unless the fleet has failed.

    Args:
        what: what the process does, for the message.
        process: the process; it is ended where it found too little memory on the GPU, to see who holds that.
        memory_fraction: the share of the GPU's memory that it may take.
        optional: True where the evaluation does without what fails: the process may live on then.

    Raises:
        EvaluationEnded: ``invalid_problem``, ``reference_error``, ``reference_timeout``; ``worker_lost`` if somebody
            killed the process; ``gpu_unhealthy`` if others hold the GPU's memory.
    """
    try:
        yield
    except EvaluationEnded as ended:
        if ended.outcome.blame is Blame.PROBLEM:
            raise
        if ended.outcome.blame is Blame.FLEET and ended.outcome.category is not Category.WORKER_LOST:
            raise
        if ended.reply is not None and ended.reply.tag is Tag.GPU_MEMORY and not optional:
            raise _out_of_gpu_memory(what, process, memory_fraction, dict(ended.outcome.facts)) from None
        raise _blamed(ended, what) from None
    except (torch.OutOfMemoryError, CudaCallError) as error:
        # The judge found no room for its own copies.
        if optional or (isinstance(error, CudaCallError) and error.error_code != _OUT_OF_MEMORY):
            raise
        raise _out_of_gpu_memory(what, process, memory_fraction, {}) from None


def _blamed(ended: EvaluationEnded, what: str) -> EvaluationEnded:
    outcome, reply = ended.outcome, ended.reply
    facts = outcome.facts.model_dump()
    phase = Phase.REFERENCE
    if reply is not None and reply.tag is Tag.PROBLEM:
        return _invalid(reply.message)
    if reply is not None:
        name = reply.exception.rpartition(".")[2]
        return EvaluationEnded(Category.REFERENCE_ERROR, f"{what} raised {name}: {reply.message}", phase, **facts)
    if outcome.category in (Category.TIMEOUT, Category.COMPILE_TIMEOUT):
        message = "the reference did not end within its deadline"
        return EvaluationEnded(Category.REFERENCE_TIMEOUT, message, phase, **facts)
    if outcome.category is Category.WORKER_LOST:
        return EvaluationEnded(Category.WORKER_LOST, f"{what}: {outcome.message}", phase, **facts)
    return EvaluationEnded(Category.REFERENCE_ERROR, f"{what}: {outcome.message}", phase, **facts)


def _out_of_gpu_memory(
    what: str, process: SealedProcess, memory_fraction: float, facts: dict[str, Any]
) -> EvaluationEnded:
    """Return whose failure it is that memory ran out: others', if the process could not have had its share."""
    process.stop()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        if free < memory_fraction * total:
            message = f"{what} found too little memory free on the GPU"
            return EvaluationEnded(Category.GPU_UNHEALTHY, message, Phase.REFERENCE)
    message = f"{what} needs more memory than it may have on the GPU"
    return EvaluationEnded(Category.REFERENCE_ERROR, message, Phase.REFERENCE, **facts)


def _dtype(spec: TensorSpec) -> torch.dtype:
    assert spec.dtype is not None
    return spec.dtype


def _nbytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * _dtype(spec).itemsize


def _invalid(message: str) -> EvaluationEnded:
    return EvaluationEnded(Category.INVALID_PROBLEM, message, Phase.REFERENCE)
