"""The judge's view of the reference: a sealed process that draws inputs and computes the expected outputs.

The problem's source runs only there. The judge sends seeds, checks that each reply is possible for a problem, and reads
inputs and outputs in the process's own memory. The process holds them until the judge releases them. A case that is
needed again is drawn again from the same seed. A failure of the process is blamed on the problem, or on the fleet if
another process killed it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import mmap
import os
import re
import secrets
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from kqueue.categories import Category
from kqueue.contract import Comparison, Phase, Precision, Settings
from workers.judge.channel import scalar_page
from workers.judge.channel.arena import taken_by
from workers.judge.channel.arguments import FORM, ArgumentsError, check
from workers.judge.channel.bits import checksum
from workers.judge.channel.buffers import LocationError, SharedTensor, view_within
from workers.judge.channel.flags import memory
from workers.judge.channel.gpu_memory import CudaCallError
from workers.judge.channel.protocol import (
    MAX_DIMS,
    MAX_STRUCTURE_BYTES,
    MAX_TENSORS,
    Answer,
    Ask,
    Draw,
    Job,
    Location,
    Opening,
    Order,
    Release,
    Reply,
    TensorSpec,
    Where,
    widened,
)
from workers.judge.channel.randomness import ANY_SIZE, KINDS
from workers.judge.ending import EvaluationEnded
from workers.judge.forkserver.process import SealedProcess
from workers.judge.host import linux
from workers.judge.pipeline import answers, compare, static
from workers.judge.pipeline.blame import blaming, invalid_problem
from workers.judge.pipeline.cases import DTYPES, GIVEN, Case
from workers.judge.pipeline.exchange import Exchange, Form, Output, await_opening, own_memory

#: Maximum number of input sets drawn by one order, and their maximum size in bytes. On a GPU each order costs
#: context switches, which small problems would notice.
_MOST_SETS: Final = 16
_PREPARED_BYTES: Final = 64 << 20
#: Maximum size in bytes of the inputs and outputs of all cases together for them to be held at the same time.
_ROOMY_BYTES: Final = 256 << 20
#: Number of imported pieces of the process's memory above which the judge closes them and clears the process.
_MANY_RUNS: Final = 128
#: Maximum share of the reference's remaining time that drawing one input set can take if variants are to be made.
#: Variants need at least six such draws, and a few dozen at most.
_VARIED_SHARE: Final = 1 / 100
#: Size in bytes of inputs whose variants a CPU draws in a few milliseconds, so that the GPU is not needed.
_QUICK_BYTES: Final = 8 << 20
#: Source of references that check the domain of values on the device, or use values as indices. Other values than
#: their own could fail a device assertion, after which the CUDA context is unusable.
_BOUND_TO_ITS_INPUTS: Final = re.compile(
    r"BCELoss|binary_cross_entropy(?!_with_logits)|multinomial|bernoulli|poisson|\.(long|int|short|byte)\("
    r"|torch\.(u?int\d*|long|short)\b"
)
#: Numbers of input sets and output sets that an arena holds: prepared sets, cases and verified calls. An output in
#: float64 takes as much as two sets, and so does the float64 output for nudged inputs.
_ARENA_INPUTS: Final = 72
_ARENA_OUTPUTS: Final = 96
#: Maximum time in seconds that loading a GPU's kernels adds to a first call.
_COLD_S: Final = 0.5
#: Maximum share of the process's GPU memory for the reference in float64.
_MEMORY_SHARE: Final = 1 / 8
#: Relative changes of a value that are below the rounding error of each precision.
_ROUNDING: Final = {Precision.FP32: 2**-25, Precision.FP16: 2**-15, Precision.BF16: 2**-12}
#: Maximum share of a CPU host's memory for the tensors of one call. Judge and candidate hold copies of them.
_HOST_SHARE: Final = 1 / 8
#: Number of forwards that the remaining time must allow before an optional forward is made.
_UNHURRIED: Final = 16
#: Maximum time in seconds for a process to free its memory before it is kept for another evaluation.
_REST_S: Final = 5.0
#: Time in seconds that a process gets to reply when no time is left, because an alarm needs a positive time.
_LEAST_S: Final = 0.001


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


@dataclass(frozen=True, slots=True)
class Taken:
    """Memory that a problem takes, reported by its process.

    Attributes:
        weights: size of the model in bytes.
        peak: maximum GPU memory in bytes that the process has allocated, or 0 on a CPU.
        drawn: number of random numbers of one input set that can be changed, or 0 before a variant was made.
    """

    weights: int
    peak: int
    drawn: int


class Reference:
    """A problem's reference in its sealed process, for one evaluation.

    Attributes:
        exchange: memory shared with the process, for its calls and their timing.
        form: form of the problem's calls, known after the first case and the first output.
        init_inputs: the constructor's arguments from ``get_init_inputs()``.
        written_bytes: bytes of the outputs that are neither inputs nor weights, reported by the process.
        forward_s: shortest time in seconds of a forward, measured by the judge.
        left_s: seconds left of the reference's deadline.
        case: the first case that was answered.
        timed_bytes: GPU memory in bytes that the process can allocate while it is timed and no kernel runs.
        output_specs: shape, dtype and device of each output.
        output_strides: strides of each output.
        noise: relative distance, for each output, between two reference outputs whose inputs differ by rounding
            errors. Empty until it is measured. All cases share this list.
        allowed_bytes: GPU memory in bytes that the process can allocate.
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
        self.allowed_bytes = 0
        self._bounds = bounds or BOUNDS[device]
        self.process = process
        self.settings = settings
        self.device = device
        self.dtype = DTYPES[settings.precision]
        self.form = Form()
        self.exchange = Exchange(process, self.form, device)
        self.init_inputs: list[Any] | dict[str, Any] = []
        self.written_bytes = 0
        self.forward_s = math.inf
        self.left_s = settings.deadlines.reference_s
        self.case: Case | None = None
        self._source = source
        self._tolerance = static.tolerance(source)
        self._opening = 0
        self._on_device: bool | None = None
        #: Time in seconds to draw one input set.
        self._draw_s = 0.0
        #: Cases whose inputs the process holds (by slot), prepared cases, and cases to release with the next draw.
        self._held: dict[int, Case] = {}
        self._ready: list[Case] = []
        self._over: list[Case] = []
        self._slots = itertools.count()
        #: Number of input sets drawn by one order, and whether all cases are held together.
        self._sets_per_draw = 1
        self._is_roomy = False
        self.timed_bytes = 0
        #: True if the model in float64 can be of use.
        self._has_wide = False
        self._wide_left = self._bounds.exact_s
        #: Time in seconds of one float64 run, or a lower bound of it.
        self._wide_s = 0.0
        #: Kinds of float64 runs that have not loaded their kernels: False for unchanged inputs, True for nudged ones.
        self._wide_cold = {False, True} if device == "cuda" else set[bool]()
        #: Relation of the given cases' outputs to their float64 outputs, and the cases (with slot and float64 outputs)
        #: that wait until the relation is known.
        self._relation = answers.Relation(settings.precision)
        self._unrelated: list[tuple[Case, int, list[torch.Tensor]]] = []
        self._may_vary = _BOUND_TO_ITS_INPUTS.search(source) is None
        self.noise: list[float] = []
        self._same_answers: bool | None = None
        self._first_sums: list[int] = []
        self._specs: tuple[TensorSpec, ...] = ()
        self.output_specs: tuple[TensorSpec, ...] = ()
        self.output_strides: tuple[tuple[int, ...], ...] = ()
        descriptor = memory("kqueue-sheet", scalar_page.SIZE)
        self._page = mmap.mmap(descriptor, scalar_page.SIZE, prot=mmap.PROT_READ)
        self._scalar_page: int | None = descriptor
        self._arena: SharedTensor | None = None

    def begin(self) -> None:
        """Start opening the device in the process without waiting for it."""
        opening = Opening(self.device, static.queues(self._source))
        self._opening = self.process.send(Order.OPEN, payload=opening)

    def await_opening(self) -> None:
        """Wait until the process has opened the device, if :meth:`begin` started that.

        Raises:
            ForkServerError: the process could not open the device.
        """
        if self._opening:
            opening, self._opening = self._opening, 0
            await_opening(self.process, opening)

    def load(self) -> None:
        """Import the problem.

        Raises:
            EvaluationEnded: ``invalid_problem``, ``reference_error`` or ``reference_timeout``.
            ForkServerError: the process could not open the device.
        """
        self.await_opening()
        job = Job(
            source=self._source,
            entry="Model",
            dtype=self.dtype,
            keeps_float64=self.settings.keeps_float64,
            tf32=self.settings.tf32,
            seed=self.settings.seed,
        )
        self._order(Order.LOAD, what="importing the problem", payload=job)

    def construct(self) -> None:
        """Construct the model on the device, under the same seed as the candidate."""
        assert self._scalar_page is not None, "a reference is constructed once"
        try:
            self._order(Order.INITIAL, what="get_init_inputs()", fds=(self._scalar_page,))
        finally:
            os.close(self._scalar_page)
            self._scalar_page = None
        self.init_inputs = self._read("get_init_inputs()", (list, dict))
        self._order(Order.CONSTRUCT, what="Model(*get_init_inputs())", payload=self.init_inputs)

    def widen(self) -> None:
        """Make a copy of the model in float64, if that is possible."""
        with contextlib.suppress(EvaluationEnded):
            self._order(Order.WIDEN, what="the model in float64", optional=True)
            self._has_wide = True

    def taken(self) -> Taken:
        """Return the memory that the problem takes."""
        self._order(Order.TAKEN, what="the problem")
        reported = self._read("the problem", dict)
        sizes = [reported.get(name) for name in ("weights", "peak", "drawn")]
        if any(type(size) is not int or not 0 <= size < 1 << 60 for size in sizes):
            raise EvaluationEnded(Category.REFERENCE_ERROR, "the problem reported impossible sizes", Phase.REFERENCE)
        return Taken(*sizes)

    def allow(self, nbytes: int) -> None:
        """Set the GPU memory in bytes that the process can allocate."""
        self.allowed_bytes = nbytes
        self._order(Order.ALLOW, what="the problem", payload=nbytes)

    def first_case(self) -> Case:
        """Draw and return a given case, which determines the form of a call's inputs.

        Large inputs are drawn on the device, because a CPU would take long.

        Raises:
            EvaluationEnded: ``invalid_problem``, ``reference_error`` or ``reference_timeout``.
        """
        if self.device == "cuda":
            first = self._new(on_device=True)
            if self._try_on_device(first):
                if self.is_large:
                    return first
                self.drop([first])
        first = self._new()
        self._draw([first])
        return first

    def warm_up_variants(self) -> None:
        """Load the code that draws variants on the device, if the problem gets only the variants for any size.

        This takes about 0.2 s, and neither the exclusive device nor much of its memory.

        Raises:
            EvaluationEnded: the process has ended.
        """
        if self._on_device and self._varies and (self.settings.checks + 1) * self.input_bytes > _ROOMY_BYTES:
            try:
                self._order(Order.WARM_UP, what="get_inputs()", optional=True)
            except EvaluationEnded:
                if self.process.ended is not None:
                    raise

    def answer_first(self, first: Case) -> None:
        """Answer the first case, which determines the form of a call's outputs."""
        # The first call loads and chooses kernels.
        self.answer(first)
        nbytes = self.input_bytes
        self._is_roomy = (self.settings.checks + 1) * first.nbytes <= _ROOMY_BYTES
        most = min(_MOST_SETS, _PREPARED_BYTES // max(nbytes, 1), MAX_TENSORS // max(len(self._specs), 1))
        self._sets_per_draw = max(1, most) if self._is_roomy else 1

    def more_cases(self, first: Case) -> list[Case]:
        """Return further given cases, as many as the settings request, each from a secret seed, and variants.

        Where all cases together would take too much memory, return only variants, which are not drawn yet.
        """
        if not self._is_roomy:
            kinds = ANY_SIZE if self.varies_any_size else ()
            return [self._new(kind, drawn=first.drawn, on_device=first.on_device) for kind in kinds]
        self.share_arena(self._wanted_arena())
        given = [self._new(on_device=first.on_device) for _ in range(self.settings.checks - 1)]
        for begin in range(0, len(given), self._sets_per_draw):
            self._draw(given[begin : begin + self._sets_per_draw])
        if self._draw_s > _VARIED_SHARE * self.left_s:
            return given
        if self.varies_any_size:
            return given + self._vary(first, ANY_SIZE)
        return given + self._vary(first, KINDS) if self._varies and self._has_wide else given

    @property
    def arena_bytes(self) -> int:
        """Size of the arena in bytes, or 0 if there is none."""
        return 0 if self._arena is None else self._arena.spec.nbytes

    def _wanted_arena(self) -> int:
        """Return the size in bytes of an arena that holds all small tensors of an evaluation."""
        inputs, outputs = (sum(taken_by(_nbytes(spec)) for spec in specs) for specs in (self._specs, self.output_specs))
        return min(_ARENA_INPUTS * inputs + _ARENA_OUTPUTS * outputs, self._bounds.arena_bytes)

    def share_arena(self, nbytes: int) -> None:
        """Share memory with the process for its small tensors. Other tensors stay in the process's own memory."""
        if not nbytes or self._arena is not None:
            return
        with contextlib.suppress(CudaCallError, EvaluationEnded):
            arena = SharedTensor(torch.empty(1, dtype=torch.uint8, device=self.device).expand(nbytes))
            assert arena.descriptor is not None
            self._arena = arena
            try:
                fds = (arena.descriptor,)
                self._order(Order.ARENA, what="the arena", payload=arena.spec, fds=fds, optional=True)
            finally:
                arena.close()

    def free_arena(self) -> None:
        """Free the arena in the judge. No case can be read afterwards."""
        if self._arena is not None:
            self.exchange.settle()
            self._arena.free()
            self._arena = None

    @property
    def _varies(self) -> bool:
        """True if kernels must answer variants too. A request's own tolerance fits only the given inputs."""
        return self.settings.comparison is Comparison.STRICT and self.settings.tolerance is None and self._may_vary

    @property
    def varies_any_size(self) -> bool:
        """True if kernels must answer only the variants that exist for inputs of any size."""
        return self._varies and (not self._is_roomy or self.input_bytes > self._bounds.varied_bytes)

    @property
    def is_hurried(self) -> bool:
        """True if there is no time for optional calls."""
        return self.left_s < _UNHURRIED * self.forward_s or self._draw_s > _VARIED_SHARE * self.left_s

    @property
    def is_large(self) -> bool:
        """True if the inputs are large enough to be drawn on a GPU."""
        return self.input_bytes > _QUICK_BYTES

    @property
    def input_specs(self) -> tuple[TensorSpec, ...]:
        """Specifications of the tensors among the inputs of one call, empty before the first draw."""
        return self._specs

    @property
    def input_bytes(self) -> int:
        """Size of the inputs of one call in bytes."""
        return sum(map(_nbytes, self._specs))

    @property
    def is_roomy(self) -> bool:
        """True if all cases are held at the same time. Otherwise one is held, and each is drawn when it is needed."""
        return self._is_roomy

    def _vary(self, given: Case, kinds: Sequence[str]) -> list[Case]:
        """Draw and return the variants of a given case that exist."""
        made: list[Case] = []
        on_device = self.is_large and self._may_draw_on_device()
        for kind in kinds:
            case = self._new(kind, drawn=given.drawn, on_device=on_device)
            try:
                if self._draw([case]):
                    made.append(case)
            except EvaluationEnded:
                if self.process.ended is not None:
                    raise
        return made

    def fresh(self) -> Case:
        """Return another input set without an answer, and release the set that was returned before."""
        if not self._ready:
            self._draw_next()
        case = self._ready.pop()
        self._over.append(case)
        return case

    def stock(self, count: int) -> None:
        """Draw input sets for :meth:`fresh` ahead of time, up to ``count`` of them, if cases are held together."""
        if self._is_roomy:
            count = min(count, _PREPARED_BYTES // max(self.input_bytes, 1))
            while len(self._ready) < count:
                self._draw_next()

    def _draw_next(self) -> None:
        on_device = self._may_draw_on_device()
        cases = [self._new(on_device=on_device) for _ in range(self._sets_per_draw)]
        released, self._over = self._over, []
        self._draw(cases, free=released)
        self._ready += cases

    def another(self) -> Case:
        """Return another input set without an answer, which is held until :meth:`drop`."""
        case = self._new(on_device=self._may_draw_on_device())
        self._draw([case])
        return case

    def again(self, drawn: int, seed: int, *, on_device: bool = False) -> Case:
        """Return a case that was drawn before, to be drawn again from the same seeds."""
        case = self._new(drawn=drawn, on_device=on_device)
        case.seed = seed
        return case

    def drop(self, cases: Sequence[Case]) -> None:
        """Release the inputs and outputs of cases."""
        slots = tuple(self._forget(case) for case in cases if case.slot is not None)
        if slots:
            self.exchange.settle()
            self._order(Order.RELEASE, what="get_inputs()", payload=Release(slots))

    def clear(self) -> None:
        """Release all cases and free the process's unused memory."""
        for case in list(self._held.values()):
            self._forget(case)
        self._ready, self._over, self._unrelated = [], [], []
        self.exchange.settle()
        self._order(Order.RELEASE, what="get_inputs()", payload=Release(all=True))
        self.process.imports.close()
        self.free_arena()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def present(self, case: Case) -> None:
        """Draw a case's inputs unless the process holds them."""
        if case.slot is None:
            self._draw([case])

    def variant(self, case: Case, kind: str, *, position: int = 0, beside: bool = False) -> Case | None:
        """Draw and return a variant of a given case with the same forward seed, or None if there is no such variant.

        Args:
            position: position of the number that differs, for kinds with one.
            beside: True to keep the other cases even where cases are held one at a time.
        """
        varied = self._new(kind, drawn=case.drawn, on_device=case.on_device)
        varied.seed, varied.position = case.seed, position
        return varied if self._may_vary and self._draw([varied], beside=beside) else None

    def outputs(self, case: Case, *, wide: bool = False) -> list[torch.Tensor] | None:
        """Answer a held case once more, in float64 if ``wide`` is set, and release its earlier outputs.

        Returns:
            The outputs, or None if their form differs from the first outputs' form.
        """
        wide = wide and self._is_related
        reply = self._call(case, afresh=True, wide=wide)
        expected = self._wide_specs if wide else self.output_specs
        if (reply.structure, reply.tensors) != (self.form.structure, expected):
            return None
        return self._tensors(expected, reply.locations, "Model.forward")

    @property
    def _wide_specs(self) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(widened(_dtype(spec)), spec.shape, spec.device) for spec in self.output_specs)

    def _new(self, kind: str = GIVEN, *, drawn: int | None = None, on_device: bool = False) -> Case:
        """Return a case that is not drawn yet."""
        drawn = secrets.randbits(63) if drawn is None else drawn
        return Case(secrets.randbits(63), drawn, on_device, kind, self._tolerance, noise=self.noise)

    def _forget(self, case: Case) -> int:
        """Clear a case's tensors before the process releases them, and return its slot."""
        assert case.slot is not None
        slot, case.slot = case.slot, None
        case.inputs, case.outputs, case.exact = [], [], None
        self._held.pop(slot, None)
        return slot

    def _may_draw_on_device(self) -> bool:
        """Return whether ``get_inputs()`` makes the same form of inputs with the GPU as torch's default device."""
        if self._on_device is None and self.device == "cuda":
            case = self._new(on_device=True)
            if self._try_on_device(case):
                self.drop([case])
        return self._on_device is True

    def _try_on_device(self, case: Case) -> bool:
        """Draw a case with the GPU as torch's default device, and return whether that succeeded."""
        try:
            self._draw([case])
            self._on_device = True
        except EvaluationEnded:
            self._on_device = False
            if self.process.ended is not None:
                raise
        return self._on_device

    def _draw(self, cases: Sequence[Case], *, free: Sequence[Case] = (), beside: bool = False) -> bool:
        """Draw the inputs of cases of one kind, and return False if there is no such variant."""
        kind, on_device = cases[0].kind, cases[0].on_device
        if not self._is_roomy and not beside:
            # Cases that cannot be held together replace those that are held.
            if len(self.process.imports) > _MANY_RUNS:
                self.clear()
            free = list(self._held.values())
        self.exchange.settle()
        slots = tuple(next(self._slots) for _ in cases)
        order = Draw(
            slots,
            tuple(case.drawn for case in cases),
            on_device,
            "" if kind == GIVEN else kind,
            free=tuple(self._forget(case) for case in free if case.slot is not None),
            position=cases[0].position,
        )
        begun = time.monotonic()
        reply = self._order(Order.DRAW, what="get_inputs()", payload=order)
        self._draw_s = (time.monotonic() - begun) / len(slots)
        if reply.answer is Answer.MISMATCH and kind != GIVEN:
            return False
        arguments = self._read("get_inputs()", (list, dict))
        specs = reply.tensors
        try:
            if check(arguments) * len(slots) != len(specs):
                raise ArgumentsError("another number of tensors than it reported")
        except ArgumentsError as error:
            raise invalid_problem(f"{FORM}; it returned {error}") from None
        if any(spec.dtype is None or len(spec.shape) > MAX_DIMS for spec in specs):
            raise invalid_problem(
                f"at most {MAX_TENSORS} dense input tensors of {MAX_DIMS} dimensions and known dtypes"
            )
        self._check_size(specs, "get_inputs()")
        if self.form.arguments is None:
            self.form.arguments, self._specs = arguments, specs
        elif repr(arguments) != repr(self.form.arguments) or specs != self._specs * len(slots):
            raise invalid_problem("get_inputs() must return the same shapes, dtypes and scalars each time")
        every = self._tensors(specs, reply.locations, "get_inputs()")
        count = len(self._specs)
        for i, (slot, case) in enumerate(zip(slots, cases, strict=True)):
            case.slot, case.inputs = slot, every[i * count : (i + 1) * count]
            self._held[slot] = case
        return True

    def _tensors(self, specs: Sequence[TensorSpec], locations: Sequence[Location], what: str) -> list[torch.Tensor]:
        """Return the process's tensors: on a GPU as views, on a CPU as copies in the judge's own memory."""
        views: list[Output] = []
        try:
            for spec, location in zip(specs, locations, strict=True):
                is_empty = 0 in spec.shape
                blank = torch.empty(spec.shape, dtype=spec.dtype, device=self.device) if is_empty else None
                views.append(self._view(spec, location) if blank is None else blank)
        except LocationError as error:
            raise EvaluationEnded(Category.REFERENCE_ERROR, f"{what}: {error}", Phase.REFERENCE) from None
        with self._blaming(what):
            return self.exchange.read(views)

    def _view(self, spec: TensorSpec, location: Location) -> Output:
        if location.where is Where.ARENA and self._arena is not None:
            return view_within(self._arena.flat, location, spec)
        return own_memory(self.process, spec, location)

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
            EvaluationEnded: see :meth:`first_case`. Only a given case or a process that has ended raises it.
        """
        answered = [case for case in cases if case.slot is not None and case.outputs]
        if self._is_roomy:
            self._draw_missing(cases)
        results: list[_Answer] = []
        together: list[Case] = []
        for case in cases:
            if case in answered or (case.kind in KINDS and not self._has_wide):
                continue
            try:
                if case.slot is None and not self._draw([case]):
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
        """Compute float64 outputs for given cases that have an answer, as far as time and memory allow.

        Raises:
            EvaluationEnded: the process has ended.
        """
        if self.forward_s > self._bounds.quick_s:
            return
        most = int(self._wide_left / self._wide_s) if self._wide_s > 0 else len(cases)
        cases = [case for case in cases if self._may_ask_wide(case)][:most]
        begun = time.perf_counter()
        replies = self._ask_all([_Question(case, wide=True) for case in cases])
        self._wide_left -= time.perf_counter() - begun
        exact_outputs = [self._wide_tensors(self._check_wide(reply)) for reply in replies]
        pairs = [(case, exact) for case, exact in zip(cases, exact_outputs, strict=True) if exact is not None]
        precision = self.settings.precision
        looks = [answers.Look(c.outputs, exact, None, None, varied=False, precision=precision) for c, exact in pairs]
        answers.look_at(looks)
        for (case, exact), look in zip(pairs, looks, strict=True):
            if self._has_wide:
                case.exact = exact
                self._relate(case, look)

    def _can_batch(self, case: Case, *, exactly: bool) -> bool:
        """Return whether a case can be answered in one batch, because its answer is quick and of a known form."""
        wide_cold = exactly and self._has_wide and not self._wide_cold.isdisjoint({False, case.kind in KINDS})
        return self._is_roomy and self.case is not None and self.forward_s <= self._bounds.quick_s and not wide_cold

    def _ask_together(self, cases: Sequence[Case], *, exactly: bool) -> list[_Answer]:
        """Answer cases in one batch, without a round trip for each."""
        questions: list[_Question] = []
        wide = 0
        for case in cases:
            questions.append(_Question(case))
            if exactly and self._may_ask_wide(case) and wide * self._wide_s < self._wide_left:
                wide += 1
                questions.append(_Question(case, wide=True))
                if case.kind in KINDS:
                    wide += 1
                    questions.append(_Question(case, _ROUNDING[self.settings.precision], wide=True))
        begun = time.perf_counter()
        replies = self._ask_all(questions)
        if wide:
            self._wide_s = (time.perf_counter() - begun) / len(questions)
            self._wide_left -= wide * self._wide_s
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
                    results[-1].nudged = self._check_wide(reply)
                else:
                    results[-1].exact = self._check_wide(reply)
        return results

    def _draw_missing(self, cases: Sequence[Case]) -> None:
        """Draw the given cases that are not held, several with one order."""
        for on_device in (False, True):
            missing = [c for c in cases if c.slot is None and c.kind == GIVEN and c.on_device is on_device]
            for begin in range(0, len(missing), self._sets_per_draw):
                self._draw(missing[begin : begin + self._sets_per_draw])

    def _ask(self, case: Case, *, exactly: bool) -> _Answer:
        """Answer a case without inspecting its outputs."""
        reply = self._call(case)
        if self.device == "cuda" and self._bounds.quick_s < self.forward_s < _COLD_S and self.case is None:
            reply = self._call(case, afresh=True)
        answer = self._check_form(case, reply)
        if exactly and self.forward_s <= self._bounds.quick_s:
            answer.exact = self._ask_wide(case)
            if case.kind in KINDS and answer.exact is not None:
                answer.nudged = self._ask_wide(case, _ROUNDING[self.settings.precision])
        return answer

    def _check_form(self, case: Case, reply: Reply) -> _Answer:
        """Check the form of an answer, and record the form of the first one."""
        self.form.mutates_inputs |= reply.mutated
        if not self.form.structure:
            self._learn_form(reply)
        elif (reply.structure, reply.tensors) != (self.form.structure, self.output_specs):
            part = "structure" if reply.structure != self.form.structure else "shapes and dtypes"
            raise invalid_problem(f"the reference must return the same {part} each time")
        self.case = self.case or case
        if reply.drew:
            self._has_wide = False  # In float64 its random numbers would differ.
        return _Answer(case, reply)

    def _inspect(self, results: Sequence[_Answer]) -> None:
        """Compute the numbers by which answers are accepted, for all of them at once."""
        for answer in results:
            case = answer.case
            case.outputs = self._tensors(self.output_specs, answer.reply.locations, "Model.forward")
            case.exact = self._wide_tensors(answer.exact) if self._has_wide else None
            # The first case can be among these, and then comes first.
            first = self.case if case.kind == GIVEN and self._same_answers is not False else None
            answer.look = answers.Look(
                case.outputs,
                case.exact if case.kind == GIVEN or case.kind in KINDS else None,
                self._wide_tensors(answer.nudged) if self._has_wide else None,
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
        if not (self._has_wide if has_own_exact else self._is_related):
            case.exact = None
        if case.kind == GIVEN:
            if look.has_nan:
                raise invalid_problem("the reference's output holds NaN, so nothing can agree with it")
            if case.exact is not None:
                self._relate(case, look)
            self._note(case, look)
            return True
        if case.kind not in KINDS:
            return look.is_tame  # Such inputs are like the problem's own.
        return case.exact is not None and look.is_precise and look.is_steady

    def _relate(self, case: Case, look: answers.Look) -> None:
        """Use float64 outputs only once all given answers show that the float64 model is the same model."""
        assert case.exact is not None
        assert case.slot is not None
        self._relation.add(look)
        self._unrelated.append((case, case.slot, case.exact))
        case.exact = None
        if self._relation.is_near:
            for one, slot, exact in self._unrelated:
                if one.slot == slot and one.outputs:
                    one.exact = exact
            self._unrelated = []
        elif self._relation.is_far:
            self._has_wide, self._unrelated = False, []

    @property
    def _is_related(self) -> bool:
        """True if the float64 model is known to be the same model."""
        return self._has_wide and self._relation.is_near

    def confirm(self, case: Case) -> None:
        """Draw and answer a case again before a kernel is called wrong on it.

        Raises:
            EvaluationEnded: ``invalid_problem`` if the inputs differ, or the outputs by more than a kernel's tolerance.
        """
        if self.left_s < 2 * self.forward_s:
            return
        self.answer(case)
        reply = self._call(case)
        again = self._tensors(self.output_specs, reply.locations, "Model.forward")
        try:
            compare.check_values(again, case, self.settings)
        except EvaluationEnded as ended:
            raise invalid_problem(f"the reference's answers to one input differ: {ended.outcome.message}") from None
        del again
        before = [checksum(tensor) for tensor in case.inputs]
        self.drop([case])
        # A kernel that runs on the device at the same time must not use up the time for float64.
        self._wide_left = math.inf
        try:
            self.answer(case)
        finally:
            self.allow_exact()
        # A variant that cannot be drawn again is no one's fault.
        if case.slot is not None and [checksum(tensor) for tensor in case.inputs] != before:
            raise invalid_problem("get_inputs() must return the same values when it is called under the same seeds")

    def allow_exact(self) -> None:
        """Reset the time for float64 outputs to its initial value."""
        self._wide_left = self._bounds.exact_s

    @property
    def is_constant(self) -> bool:
        """True if the outputs for at least two given cases were all the same within the tolerance."""
        return self._same_answers is True

    def digest(self, case: Case) -> str:
        """Return a hash of the bits of a case's outputs."""
        bits = hashlib.sha256()
        for tensor in case.outputs:
            if tensor.numel():
                bits.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return bits.hexdigest()

    def _call(self, case: Case, *, afresh: bool = False, wide: bool = False) -> Reply:
        begun = time.perf_counter()
        [reply] = self._ask_all([_Question(case, wide=wide, afresh=afresh)])
        if isinstance(reply, EvaluationEnded):
            raise reply
        self.forward_s = min(self.forward_s, time.perf_counter() - begun)
        return reply

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
        self._check_size(specs, "Model.forward")
        self.form.structure, self.output_specs = structure, specs
        self.output_strides = tuple(tuple(location.stride) for location in reply.locations)
        self.form.output_aliases = tuple(location.index - 1 if location.index else None for location in reply.locations)
        self.written_bytes = min(reply.written_bytes, sum(_nbytes(spec) for spec in specs))

    def _note(self, case: Case, look: answers.Look) -> None:
        """Compare the outputs of a given case with the first case's outputs."""
        if case is self.case or self.case is None:
            self._first_sums = [checksum(tensor) for tensor in case.outputs]
        elif self._same_answers is not False and look.first is not None:
            self._same_answers = look.is_as_first
        elif self._same_answers is not False:
            self._same_answers = [checksum(tensor) for tensor in case.outputs] == self._first_sums

    @contextlib.contextmanager
    def timed(self) -> Generator[Exchange]:
        """Share the first case's inputs with the process for timed calls."""
        case = self.case
        assert case is not None, "it has answered a case"
        if self.device == "cuda":
            self.allow(self.timed_bytes)
        self.present(case)
        with self._blaming("get_inputs()"):
            self.exchange.bind_inputs(case.inputs)
            if not self._is_roomy:
                self.drop([case])
            self.exchange.bind_outputs(self.output_specs)
        try:
            # A launch-overhead call delivers the outputs of the call before it, so there must be one.
            self._order(Order.RUN, what="Model.forward", seed=case.seed)
            yield self.exchange
        finally:
            self.exchange.unbind()
        with self._blaming("get_inputs()"):
            self.exchange.bind_inputs([])
        if not self._is_roomy:
            self.clear()

    def _ask_wide(self, case: Case, nudge: float = 0.0) -> Reply | None:
        """Return the float64 reference's answer, or None if it fails or would take too much memory or time."""
        if not self._may_ask_wide(case):
            return None
        begun = time.perf_counter()
        [reply] = self._ask_all([_Question(case, nudge, wide=True)])
        took = time.perf_counter() - begun
        self._wide_s = max(0.0, took - _COLD_S) if (nudge > 0) in self._wide_cold else took
        self._wide_left -= self._wide_s
        self._wide_cold.discard(nudge > 0)
        return self._check_wide(reply)

    def _may_ask_wide(self, case: Case) -> bool:
        """Return whether there is a float64 reference, and enough time and memory for its answer."""
        numbers = sum(tensor.numel() for tensor in case.inputs) + sum(math.prod(s.shape) for s in self.output_specs)
        return self._has_wide and self._wide_left > 0 and self._fits(4 * 8 * numbers)

    def _check_wide(self, reply: Reply | EvaluationEnded) -> Reply | None:
        """Return the float64 reference's answer, or None if the problem does not support float64."""
        if isinstance(reply, Reply) and (reply.structure, reply.tensors) == (self.form.structure, self._wide_specs):
            return reply
        self._has_wide = False
        return None

    def _wide_tensors(self, reply: Reply | None) -> list[torch.Tensor] | None:
        return None if reply is None else self._tensors(reply.tensors, reply.locations, "the model in float64")

    def _fits(self, nbytes: int) -> bool:
        """Return whether a float64 call with this many bytes fits into its share of the memory."""
        return nbytes < (_MEMORY_SHARE * self.allowed_bytes if self.device == "cuda" else self._bounds.host_bytes)

    def _check_size(self, specs: Sequence[TensorSpec], what: str) -> None:
        """Reject tensors of an impossible shape, and tensors of which the judge cannot hold a few copies."""
        if any(size < 0 for spec in specs for size in spec.shape):
            raise invalid_problem(f"{what} reported a tensor of an impossible shape")
        nbytes = sum(math.prod(max(size, 1) for size in spec.shape) * _dtype(spec).itemsize for spec in specs)
        if self.device == "cuda":
            most = self.allowed_bytes
        else:
            most = min(self.settings.limits.host_memory_bytes, int(_HOST_SHARE * linux.physical_bytes()))
        if nbytes > most:
            message = f"{what} makes tensors of {nbytes} bytes, and at most {most} are possible here"
            raise EvaluationEnded(Category.REFERENCE_ERROR, message, Phase.REFERENCE)

    def _read(self, what: str, kind: type | tuple[type, ...]) -> Any:
        try:
            value = scalar_page.decode(self._page)
        except scalar_page.ScalarPageError as error:
            raise EvaluationEnded(Category.REFERENCE_ERROR, f"{what}: {error}", Phase.REFERENCE) from None
        if not isinstance(value, kind):
            raise EvaluationEnded(Category.REFERENCE_ERROR, f"{what} sent {type(value).__name__}", Phase.REFERENCE)
        return value

    def _order(self, order: Order, *, what: str, optional: bool = False, **arguments: Any) -> Reply:
        """Send an order and wait for the reply within the reference's deadline."""
        with self._within_deadline(), self._blaming(what, optional=optional):
            return self.process.order(order, **arguments)

    @contextlib.contextmanager
    def _within_deadline(self) -> Generator[None]:
        """Apply the reference's deadline to orders in this context, and subtract the time that they take."""
        if self.process.phase is not Phase.REFERENCE:
            self.process.enter(Phase.REFERENCE, max(self.left_s, _LEAST_S))
        waited_s = self.process.waited_s
        try:
            yield
        finally:
            self.left_s = max(self.left_s - (self.process.waited_s - waited_s), 0.0)

    def _ask_all(self, questions: Sequence[_Question]) -> list[Reply | EvaluationEnded]:
        """Send questions together and return the reply or the failure of each. Raise if the process ends."""
        if not questions:
            return []
        asks = tuple(question.ask() for question in questions)
        with self._within_deadline(), self._blaming("Model.forward"):
            replies = self.process.order_each(Order.ANSWER, len(asks), payload=asks)
        return [self._blamed(reply, ask) for reply, ask in zip(replies, asks, strict=True)]

    def _blamed(self, reply: Reply | EvaluationEnded, ask: Ask) -> Reply | EvaluationEnded:
        """Return the reply to a question, or its failure with the problem or the fleet blamed."""
        if isinstance(reply, Reply):
            return reply
        what = "the model in float64" if ask.wide else "Model.forward"
        try:
            with self._blaming(what, optional=ask.wide):
                raise reply
        except EvaluationEnded as ended:
            if self.process.ended is not None:
                raise
            return ended

    def _blaming(self, what: str, *, optional: bool = False) -> contextlib.AbstractContextManager[None]:
        return blaming(what, self.process, self.allowed_bytes, optional=optional)

    def renew(self) -> None:
        """Reset the deadlines of a kept process to a new process's deadlines."""
        self.left_s = self.settings.deadlines.reference_s
        self.process.enter(Phase.REFERENCE, self.left_s)
        self.process.allow_compilers(self.settings.deadlines.compile_s)

    def keep(self, key: str, memo: dict[str, Any], wanted: Path) -> None:
        """Hand the process over to a later evaluation of the same problem and settings.

        Raises:
            EvaluationEnded: the process did not free its memory in time.
            ForkServerError: the fork server is gone.
        """
        self.process.enter(Phase.CLEANUP, _REST_S)
        self.process.allow_compilers(0.0)
        self.process.order(Order.REST)
        self.process.count_cpu()
        self.process.leave(key, memo, wanted)


@dataclass(frozen=True, slots=True)
class _Question:
    """A question to the reference on one case: its answer, or its float64 answer, on inputs that can be nudged."""

    case: Case
    nudge: float = 0.0
    wide: bool = False
    afresh: bool = False

    def ask(self) -> Ask:
        """Return the question as a message."""
        slot, seed = self.case.slot, self.case.seed
        assert slot is not None
        return Ask(slot, seed, self.wide, self.nudge, secrets.randbits(63) if self.nudge else 0, afresh=self.afresh)


@dataclass(slots=True)
class _Answer:
    """The reference's answer to a case, its float64 answer, and its float64 answer to nudged inputs."""

    case: Case
    reply: Reply
    exact: Reply | None = None
    nudged: Reply | None = None
    look: answers.Look | None = None


def _dtype(spec: TensorSpec) -> torch.dtype:
    assert spec.dtype is not None
    return spec.dtype


def _nbytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * _dtype(spec).itemsize
