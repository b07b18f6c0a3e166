"""The reference as the judge sees it: a sealed process that draws inputs and answers them.

The problem's source runs there and nowhere else. The judge gives seeds, checks each reply against what a problem may
be, and reads inputs and answers where they lie. The process holds them until the judge lets go of them; what is needed
again is drawn again, from the same seed. Failures of the process are the problem's; the fleet's, if somebody else
killed it.
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

#: Input sets that are drawn at once, and what they may take, in bytes. On a GPU each order costs turns on its
#: processors, which small problems would feel.
_MOST_SETS: Final = 16
_PREPARED_BYTES: Final = 64 << 20
#: What the inputs and answers of all cases may take together, in bytes, to be held at the same time.
_ROOMY_BYTES: Final = 256 << 20
#: The memory that a process has announced is forgotten beyond so many pieces, when it holds nothing.
_MANY_RUNS: Final = 128
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
#: How many sets of inputs an arena holds, and how many of outputs: those that are drawn ahead, the cases, and the calls
#: that are verified; an answer in float64 takes as much as two, and so does that to moved inputs.
_ARENA_INPUTS: Final = 72
_ARENA_OUTPUTS: Final = 96
#: What of a first call goes into loading a GPU's kernels, at most, in seconds.
_COLD_S: Final = 0.5
#: The share of the GPU's memory that the process may take, for the reference in float64.
_MEMORY_SHARE: Final = 1 / 8
#: Changes of a value that no kernel need tell from none.
_ROUNDING: Final = {Precision.FP32: 2**-25, Precision.FP16: 2**-15, Precision.BF16: 2**-12}
#: The share of a host's memory that the tensors of one call may take on a CPU: judge and candidate have copies.
_HOST_SHARE: Final = 1 / 8
#: Forwards for which there must be time to have one more for the sake of a label.
_UNHURRIED: Final = 16
#: How long a process may take to give memory back before it is kept, in seconds.
_REST_S: Final = 5.0
#: What a process is given to answer in where no time is left, in seconds: an alarm needs some.
_LEAST_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class Bounds:
    """What may be spent on more than the given cases.

    Attributes:
        quick_s: the reference in float64 is run only where a forward took less than this, in seconds.
        exact_s: how long it may take, all calls together, in seconds.
        host_bytes: the memory that one call of it may take on a CPU; on a GPU a share of its allowance counts.
        varied_bytes: the largest inputs of which all variants are made; larger ones have those for any size.
        arena_bytes: the largest arena; 0 for none.
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
    """What a problem takes, in bytes, as its process tells.

    Attributes:
        weights: of the model.
        peak: the most that the process has taken of the GPU's memory; 0 on a CPU.
        drawn: how many random numbers of one input set may be changed, a count; 0 before a variant was made.
    """

    weights: int
    peak: int
    drawn: int


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
        timed_bytes: what the process may take of the GPU's memory while it is timed, when no kernel is there.
        output_specs, output_strides: of the outputs, and how they lie.
        noise: for each output, how far the reference lies from itself where rounding errors move the inputs, as a share
            of its size; empty until that is known. All its cases have the same list.
        allowed_bytes: what the process may take of the GPU's memory.
    """

    def __init__(
        self,
        process: SealedProcess,
        source: str,
        settings: Settings,
        device: str,
        bounds: Bounds | None = None,
    ) -> None:
        """Take a process that runs nothing yet.

        Args:
            process: a reference's, freshly forked or taken over.
            source: the problem's.
            settings: the evaluation's.
            device: ``cpu`` or ``cuda``.
            bounds: of what may be spent on exact answers and variants; None for the device's.
        """
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
        #: What drawing one input set took, in seconds.
        self._draw_s = 0.0
        #: Cases whose inputs the process holds, by their slots; those that were drawn ahead; those that are over.
        self._held: dict[int, Case] = {}
        self._ready: list[Case] = []
        self._over: list[Case] = []
        self._slots = itertools.count()
        #: How many input sets are drawn at once; whether all cases are held together.
        self._ahead = 1
        self._is_roomy = False
        self.timed_bytes = 0
        #: Whether the model in float64 may be of use.
        self._has_wide = False
        self._wide_left = self._bounds.exact_s
        #: What such a run took, or less, in seconds.
        self._wide_s = 0.0
        #: Which runs in float64 have not loaded their kernels yet: on inputs as they are, and on moved ones.
        self._wide_cold = {False, True} if device == "cuda" else set[bool]()
        #: How given answers lie to those in float64; and cases, their slots and such answers, while these are too few.
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
        """Have the process open the device, and do not wait for it."""
        opening = Opening(self.device, static.queues(self._source))
        self._opening = self.process.send(Order.OPEN, payload=opening)

    def await_opening(self) -> None:
        """Wait until the process has opened the device, if it has only begun to.

        Raises:
            ForkServerError: it could not.
        """
        if self._opening:
            opening, self._opening = self._opening, 0
            await_opening(self.process, opening)

    def load(self) -> None:
        """Import the problem.

        Raises:
            EvaluationEnded: ``invalid_problem``, ``reference_error`` or ``reference_timeout``.
            ForkServerError: the process could not be made ready.
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
        """Have the model constructed on the device, under the seed that the candidate will have too.

        Raises:
            EvaluationEnded: as :meth:`load`.
        """
        assert self._scalar_page is not None, "a reference is constructed once"
        try:
            self._order(Order.INITIAL, what="get_init_inputs()", fds=(self._scalar_page,))
        finally:
            os.close(self._scalar_page)
            self._scalar_page = None
        self.init_inputs = self._read("get_init_inputs()", (list, dict))
        self._order(Order.CONSTRUCT, what="Model(*get_init_inputs())", payload=self.init_inputs)

    def widen(self) -> None:
        """Have a copy of the model made in float64, if it can be had."""
        with contextlib.suppress(EvaluationEnded):
            self._order(Order.WIDEN, what="the model in float64", optional=True)
            self._has_wide = True

    def taken(self) -> Taken:
        """Return what the problem takes.

        Raises:
            EvaluationEnded: as :meth:`load`.
        """
        self._order(Order.TAKEN, what="the problem")
        told = self._read("the problem", dict)
        found = [told.get(name) for name in ("weights", "peak", "drawn")]
        if any(type(size) is not int or not 0 <= size < 1 << 60 for size in found):
            raise EvaluationEnded(Category.REFERENCE_ERROR, "the problem told of impossible sizes", Phase.REFERENCE)
        return Taken(*found)

    def allow(self, nbytes: int) -> None:
        """Let the process take so much of the GPU's memory, in bytes."""
        self.allowed_bytes = nbytes
        self._order(Order.ALLOW, what="the problem", payload=nbytes)

    def first_case(self) -> Case:
        """Return a given case, drawn: only then it is known what the inputs of a call take.

        Large inputs are drawn on the device: on a CPU that would take long.

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
        """Have the process load what variants need, where they are drawn on the device, and are those of any size.

        That takes a fifth of a second, for which neither the device nor much of its memory need be had.

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
        """Answer the first case: only then it is known what the outputs of a call take.

        Raises:
            EvaluationEnded: as :meth:`first_case`.
        """
        # Its first call loads and chooses kernels.
        self.answer(first)
        nbytes = self.input_bytes
        self._is_roomy = (self.settings.checks + 1) * first.nbytes <= _ROOMY_BYTES
        most = min(_MOST_SETS, _PREPARED_BYTES // max(nbytes, 1), MAX_TENSORS // max(len(self._specs), 1))
        self._ahead = max(1, most) if self._is_roomy else 1

    def more_cases(self, first: Case) -> list[Case]:
        """Return further given cases, as many as the settings ask for, each from a secret seed, and variants.

        Where they would take too much memory together there are only variants, which are not drawn yet.

        Raises:
            EvaluationEnded: as :meth:`first_case`.
        """
        if not self._is_roomy:
            kinds = ANY_SIZE if self.varies_any_size else ()
            return [self._new(kind, drawn=first.drawn, on_device=first.on_device) for kind in kinds]
        self.share_arena(self._wanted_arena())
        given = [self._new(on_device=first.on_device) for _ in range(self.settings.checks - 1)]
        for begin in range(0, len(given), self._ahead):
            self._draw(given[begin : begin + self._ahead])
        if self._draw_s > _VARIED_SHARE * self.left_s:
            return given
        if self.varies_any_size:
            return given + self._vary(first, ANY_SIZE)
        return given + self._vary(first, KINDS) if self._varies and self._has_wide else given

    @property
    def arena_bytes(self) -> int:
        """Size of the arena; 0 where there is none."""
        return 0 if self._arena is None else self._arena.spec.nbytes

    def _wanted_arena(self) -> int:
        """Return how large an arena holds all that is small of an evaluation."""
        inputs, outputs = (sum(taken_by(_nbytes(spec)) for spec in specs) for specs in (self._specs, self.output_specs))
        return min(_ARENA_INPUTS * inputs + _ARENA_OUTPUTS * outputs, self._bounds.arena_bytes)

    def share_arena(self, nbytes: int) -> None:
        """Give the process memory in which it holds what is small; what finds no room there it holds in its own.

        Args:
            nbytes: the memory's size; 0 for none.
        """
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
        """Give the arena back on this side. Nothing may look at a case any more."""
        if self._arena is not None:
            self.exchange.settle()
            self._arena.free()
            self._arena = None

    @property
    def _varies(self) -> bool:
        """True if kernels answer variants too. An evaluation's own tolerance was chosen for the given inputs."""
        return self.settings.comparison is Comparison.STRICT and self.settings.tolerance is None and self._may_vary

    @property
    def varies_any_size(self) -> bool:
        """True if kernels answer the variants that there are for inputs of any size, and no others."""
        return self._varies and (not self._is_roomy or self.input_bytes > self._bounds.varied_bytes)

    @property
    def is_hurried(self) -> bool:
        """True if there is no time for more calls than must be made."""
        return self.left_s < _UNHURRIED * self.forward_s or self._draw_s > _VARIED_SHARE * self.left_s

    @property
    def is_large(self) -> bool:
        """True if drawing inputs is work for a GPU."""
        return self.input_bytes > _QUICK_BYTES

    @property
    def input_specs(self) -> tuple[TensorSpec, ...]:
        """Form of the tensors among the inputs of one call; empty before the first are drawn."""
        return self._specs

    @property
    def input_bytes(self) -> int:
        """Bytes of the inputs of one call."""
        return sum(map(_nbytes, self._specs))

    @property
    def is_roomy(self) -> bool:
        """True if all cases are held at the same time; else one is, and the others are made when they are needed."""
        return self._is_roomy

    def _vary(self, given: Case, kinds: Sequence[str]) -> list[Case]:
        """Return the variants of a given case, as many as there are."""
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
        """Return one more input set, unanswered. The one that was returned before is let go of.

        Raises:
            EvaluationEnded: as :meth:`first_case`.
        """
        if not self._ready:
            self._draw_next()
        case = self._ready.pop()
        self._over.append(case)
        return case

    def stock(self, count: int) -> None:
        """Draw input sets for :meth:`fresh` now, so many if there is room, where cases are held together.

        Raises:
            EvaluationEnded: as :meth:`first_case`.
        """
        if self._is_roomy:
            count = min(count, _PREPARED_BYTES // max(self.input_bytes, 1))
            while len(self._ready) < count:
                self._draw_next()

    def _draw_next(self) -> None:
        on_device = self._may_draw_on_device()
        cases = [self._new(on_device=on_device) for _ in range(self._ahead)]
        over, self._over = self._over, []
        self._draw(cases, free=over)
        self._ready += cases

    def another(self) -> Case:
        """Return one more input set, unanswered, which is held until :meth:`drop`."""
        case = self._new(on_device=self._may_draw_on_device())
        self._draw([case])
        return case

    def again(self, drawn: int, seed: int, *, on_device: bool = False) -> Case:
        """Return the case that was drawn under a seed before, not drawn yet; ``seed`` is its forward's."""
        case = self._new(drawn=drawn, on_device=on_device)
        case.seed = seed
        return case

    def drop(self, cases: Sequence[Case]) -> None:
        """Let go of cases: of their inputs and answers."""
        slots = tuple(self._forget(case) for case in cases if case.slot is not None)
        if slots:
            self.exchange.settle()
            self._order(Order.RELEASE, what="get_inputs()", payload=Release(slots))

    def clear(self) -> None:
        """Let go of all cases, and have the process give back all memory that is not in use."""
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
        """Have a case's inputs drawn, unless the process holds them."""
        if case.slot is None:
            self._draw([case])

    def variant(self, case: Case, kind: str, *, position: int = 0, beside: bool = False) -> Case | None:
        """Return a variant of a given case, drawn, whose forward has the same seed; None where there is none.

        Args:
            case: the given one.
            kind: of the variant.
            position: of the number that differs, for kinds with one.
            beside: True to hold it beside all else, also where cases are held one at a time.

        Raises:
            EvaluationEnded: as :meth:`first_case`.
        """
        varied = self._new(kind, drawn=case.drawn, on_device=case.on_device)
        varied.seed, varied.position = case.seed, position
        return varied if self._may_vary and self._draw([varied], beside=beside) else None

    def outputs(self, case: Case, *, wide: bool = False) -> list[torch.Tensor] | None:
        """Return one more answer to a case that is held, whose earlier ones are let go of; None if its form is another.

        Args:
            case: the case.
            wide: True to ask the model in float64, if there is one.

        Raises:
            EvaluationEnded: as :meth:`first_case`.
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
        """Forget where a case's tensors lie, before the process lets go of them; return its slot."""
        assert case.slot is not None
        slot, case.slot = case.slot, None
        case.inputs, case.outputs, case.exact = [], [], None
        self._held.pop(slot, None)
        return slot

    def _may_draw_on_device(self) -> bool:
        """Return whether ``get_inputs()`` makes the same kind of inputs with the GPU as torch's default device."""
        if self._on_device is None and self.device == "cuda":
            case = self._new(on_device=True)
            if self._try_on_device(case):
                self.drop([case])
        return self._on_device is True

    def _try_on_device(self, case: Case) -> bool:
        """Draw a case with the GPU as torch's default device; return whether it can be done."""
        try:
            self._draw([case])
            self._on_device = True
        except EvaluationEnded:
            self._on_device = False
            if self.process.ended is not None:
                raise
        return self._on_device

    def _draw(self, cases: Sequence[Case], *, free: Sequence[Case] = (), beside: bool = False) -> bool:
        """Have the inputs of cases of one kind drawn; return False if there is no such variant.

        Where cases are not held together, those that are held are let go of first, unless ``beside`` is set.
        """
        kind, on_device = cases[0].kind, cases[0].on_device
        if not self._is_roomy and not beside:
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
                raise ArgumentsError("another number of tensors than it told of")
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
        """Return tensors of the process: on a GPU where they lie, on a CPU as copies in the judge's own memory."""
        views: list[Output] = []
        try:
            for spec, location in zip(specs, locations, strict=True):
                empty = 0 in spec.shape
                blank = torch.empty(spec.shape, dtype=spec.dtype, device=self.device) if empty else None
                views.append(self._where_it_lies(spec, location) if blank is None else blank)
        except LocationError as error:
            raise EvaluationEnded(Category.REFERENCE_ERROR, f"{what}: {error}", Phase.REFERENCE) from None
        with self._blaming(what):
            return self.exchange.read(views)

    def _where_it_lies(self, spec: TensorSpec, location: Location) -> Output:
        if location.where is Where.ARENA and self._arena is not None:
            return view_within(self._arena.flat, location, spec)
        return own_memory(self.process, spec, location)

    def answer(self, *cases: Case, exactly: bool = True) -> list[Case]:
        """Run the reference on cases and, where it may, in float64; those that are not drawn are drawn first.

        On a GPU its work is done for all of them before the judge begins with its own: the two would take turns.

        Args:
            cases: the cases; those that are answered already are left as they are.
            exactly: False for no answers in float64.

        Returns:
            the cases that it answered. Left out are only variants: their inputs may lie outside the problem's domain.
            One whose numbers are unlike the problem's own counts only if the reference in float64 agrees, and stays
            where it was when the inputs change by less than a rounding error: else a right kernel could answer
            otherwise.

        Raises:
            EvaluationEnded: as :meth:`first_case`; for given cases only, or when the process has ended.
        """
        known = [case for case in cases if case.slot is not None and case.outputs]
        if self._is_roomy:
            self._draw_missing(cases)
        asked: list[_Answer] = []
        together: list[Case] = []
        for case in cases:
            if case in known or (case.kind in KINDS and not self._has_wide):
                continue
            try:
                if case.slot is None and not self._draw([case]):
                    continue
                if self._may_wait(case, exactly=exactly):
                    together.append(case)
                else:
                    asked.append(self._ask(case, exactly=exactly))
            except EvaluationEnded:
                if case.kind == GIVEN or self.process.ended is not None:
                    raise
        asked += self._ask_together(together, exactly=exactly)
        self._see(asked)
        for answer in asked:
            if self._take(answer):
                known.append(answer.case)
            else:
                answer.case.outputs, answer.case.exact = [], None
        return [case for case in cases if case in known]

    def sharpen(self, cases: Sequence[Case]) -> None:
        """Have given cases that are answered answered in float64 too, where that may be.

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
        heard = [self._wide_tensors(self._heard_wide(reply)) for reply in replies]
        found = [(case, exact) for case, exact in zip(cases, heard, strict=True) if exact is not None]
        precision = self.settings.precision
        looks = [answers.Look(c.outputs, exact, None, None, varied=False, precision=precision) for c, exact in found]
        answers.look_at(looks)
        for (case, exact), look in zip(found, looks, strict=True):
            if self._has_wide:
                case.exact = exact
                self._relate(case, look)

    def _may_wait(self, case: Case, *, exactly: bool) -> bool:
        """Return whether a case may be answered together with others: the answers hold nothing new, and are quick."""
        wide_cold = exactly and self._has_wide and not self._wide_cold.isdisjoint({False, case.kind in KINDS})
        return self._is_roomy and self.case is not None and self.forward_s <= self._bounds.quick_s and not wide_cold

    def _ask_together(self, cases: Sequence[Case], *, exactly: bool) -> list[_Answer]:
        """Have the process answer cases, one behind the other, without waiting for each."""
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
        asked: list[_Answer] = []
        for question, reply in zip(questions, replies, strict=True):
            case = question.case
            if not question.wide:
                try:
                    if isinstance(reply, EvaluationEnded):
                        raise reply
                    asked.append(self._heard(case, reply))
                except EvaluationEnded:
                    if case.kind == GIVEN:
                        raise
            elif asked and asked[-1].case is case:
                if question.nudge:
                    asked[-1].nudged = self._heard_wide(reply)
                else:
                    asked[-1].exact = self._heard_wide(reply)
        return asked

    def _draw_missing(self, cases: Sequence[Case]) -> None:
        """Draw the given cases that are not held, several at once."""
        for on_device in (False, True):
            missing = [c for c in cases if c.slot is None and c.kind == GIVEN and c.on_device is on_device]
            for begin in range(0, len(missing), self._ahead):
                self._draw(missing[begin : begin + self._ahead])

    def _ask(self, case: Case, *, exactly: bool) -> _Answer:
        """Have the process answer a case, without looking at what it answers."""
        reply = self._call(case)
        if self.device == "cuda" and self._bounds.quick_s < self.forward_s < _COLD_S and self.case is None:
            reply = self._call(case, afresh=True)
        answer = self._heard(case, reply)
        if exactly and self.forward_s <= self._bounds.quick_s:
            answer.exact = self._ask_wide(case)
            if case.kind in KINDS and answer.exact is not None:
                answer.nudged = self._ask_wide(case, _ROUNDING[self.settings.precision])
        return answer

    def _heard(self, case: Case, reply: Reply) -> _Answer:
        """Check the form of an answer, and note what the first one tells of all."""
        self.form.mutates_inputs |= reply.mutated
        if not self.form.structure:
            self._learn_form(reply)
        elif (reply.structure, reply.tensors) != (self.form.structure, self.output_specs):
            what = "structure" if reply.structure != self.form.structure else "shapes and dtypes"
            raise invalid_problem(f"the reference must return the same {what} each time")
        self.case = self.case or case
        if reply.drew:
            self._has_wide = False  # its random numbers are others in float64
        return _Answer(case, reply)

    def _see(self, asked: Sequence[_Answer]) -> None:
        """Look at answers, all of them at once."""
        for answer in asked:
            case = answer.case
            case.outputs = self._tensors(self.output_specs, answer.reply.locations, "Model.forward")
            case.exact = self._wide_tensors(answer.exact) if self._has_wide else None
            # The first may be among them, and before the others.
            first = self.case if case.kind == GIVEN and self._same_answers is not False else None
            answer.look = answers.Look(
                case.outputs,
                case.exact if case.kind == GIVEN or case.kind in KINDS else None,
                self._wide_tensors(answer.nudged) if self._has_wide else None,
                first.outputs if first is not None and first is not case and first.outputs else None,
                varied=case.kind != GIVEN,
                precision=self.settings.precision,
            )
        answers.look_at([answer.look for answer in asked if answer.look is not None])

    def _take(self, answer: _Answer) -> bool:
        """Decide by the look that was had at an answer whether it counts."""
        case, look = answer.case, answer.look
        assert look is not None
        # Those of these kinds are held to their own exact answer, given cases to all of theirs.
        is_held = case.kind == GIVEN or case.kind in KINDS
        if not (self._has_wide if is_held else self._is_related):
            case.exact = None
        if case.kind == GIVEN:
            if look.has_nan:
                raise invalid_problem("the reference's output holds NaN, so nothing can agree with it")
            if case.exact is not None:
                self._relate(case, look)
            self._note(case, look)
            return True
        if case.kind not in KINDS:
            return look.is_tame  # such inputs are not unlike the problem's own
        return case.exact is not None and look.is_precise and look.is_steady

    def _relate(self, case: Case, look: answers.Look) -> None:
        """See by all given answers whether those in float64 are of the same model: only then cases have them."""
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
        """Whether the model in float64 is known to be the same."""
        return self._has_wide and self._relation.is_near

    def confirm(self, case: Case) -> None:
        """Answer a case again, and draw it again, before a kernel is called wrong on it.

        Raises:
            EvaluationEnded: ``invalid_problem`` if the answers differ by more than a kernel's may, or the inputs do.
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
        # A kernel may be at work on the device: it must not be able to use the time for float64 up.
        self._wide_left = math.inf
        try:
            self.answer(case)
        finally:
            self.allow_exact()
        # A variant that cannot be had again is nobody's fault.
        if case.slot is not None and [checksum(tensor) for tensor in case.inputs] != before:
            raise invalid_problem("get_inputs() must return the same values when it is called under the same seeds")

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

    def _call(self, case: Case, *, afresh: bool = False, wide: bool = False) -> Reply:
        begun = time.perf_counter()
        [reply] = self._ask_all([_Question(case, wide=wide, afresh=afresh)])
        if isinstance(reply, EvaluationEnded):
            raise reply
        self.forward_s = min(self.forward_s, time.perf_counter() - begun)
        return reply

    def _learn_form(self, reply: Reply) -> None:
        """Check the form of the first outputs."""
        structure, specs = reply.structure, reply.tensors
        if "?" in structure or not specs or structure.count("T") > MAX_TENSORS:
            raise invalid_problem(f"the reference must return 1 to {MAX_TENSORS} tensors, not {structure}")
        if len(structure.encode()) >= MAX_STRUCTURE_BYTES:
            raise invalid_problem(
                f"the arrangement of the reference's outputs takes more than {MAX_STRUCTURE_BYTES} bytes to tell"
            )
        if any(spec.device != self.device or len(spec.shape) > MAX_DIMS or spec.dtype is None for spec in specs):
            raise invalid_problem(f"the reference's outputs must be dense tensors on {self.device} of known dtypes")
        self._check_size(specs, "Model.forward")
        self.form.structure, self.output_specs = structure, specs
        self.output_strides = tuple(tuple(location.stride) for location in reply.locations)
        self.form.output_aliases = tuple(location.index - 1 if location.index else None for location in reply.locations)
        self.written_bytes = min(reply.written_bytes, sum(_nbytes(spec) for spec in specs))

    def _note(self, case: Case, look: answers.Look) -> None:
        """Compare the answer to a given case with that to the first."""
        if case is self.case or self.case is None:
            self._first_sums = [checksum(tensor) for tensor in case.outputs]
        elif self._same_answers is not False and look.first is not None:
            self._same_answers = look.is_as_first
        elif self._same_answers is not False:
            self._same_answers = [checksum(tensor) for tensor in case.outputs] == self._first_sums

    @contextlib.contextmanager
    def timed(self) -> Generator[Exchange]:
        """Share inputs with the process meanwhile, which timed calls use."""
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
            self._order(Order.RUN, what="Model.forward", seed=case.seed)  # a null delivers the outputs of a call before
            yield self.exchange
        finally:
            self.exchange.unbind()
        with self._blaming("get_inputs()"):
            self.exchange.bind_inputs([])
        if not self._is_roomy:
            self.clear()

    def _ask_wide(self, case: Case, nudge: float = 0.0) -> Reply | None:
        """Have the float64 reference answer; None where it cannot, or would take too much memory or time."""
        if not self._may_ask_wide(case):
            return None
        begun = time.perf_counter()
        [reply] = self._ask_all([_Question(case, nudge, wide=True)])
        took = time.perf_counter() - begun
        self._wide_s = max(0.0, took - _COLD_S) if (nudge > 0) in self._wide_cold else took
        self._wide_left -= self._wide_s
        self._wide_cold.discard(nudge > 0)
        return self._heard_wide(reply)

    def _may_ask_wide(self, case: Case) -> bool:
        """Return whether there is a float64 reference, and time and memory for its answer."""
        numbers = sum(tensor.numel() for tensor in case.inputs) + sum(math.prod(s.shape) for s in self.output_specs)
        return self._has_wide and self._wide_left > 0 and self._fits(4 * 8 * numbers)

    def _heard_wide(self, reply: Reply | EvaluationEnded) -> Reply | None:
        """Return the float64 reference's answer; None where it is none: the problem was not written for float64."""
        if isinstance(reply, Reply) and (reply.structure, reply.tensors) == (self.form.structure, self._wide_specs):
            return reply
        self._has_wide = False
        return None

    def _wide_tensors(self, reply: Reply | None) -> list[torch.Tensor] | None:
        return None if reply is None else self._tensors(reply.tensors, reply.locations, "the model in float64")

    def _fits(self, nbytes: int) -> bool:
        """Return whether so much may be taken of the memory that is left."""
        return nbytes < (_MEMORY_SHARE * self.allowed_bytes if self.device == "cuda" else self._bounds.host_bytes)

    def _check_size(self, specs: Sequence[TensorSpec], what: str) -> None:
        """Refuse tensors of an impossible shape, or larger than the judge can hold a few copies of."""
        if any(size < 0 for spec in specs for size in spec.shape):
            raise invalid_problem(f"{what} told of a tensor of an impossible shape")
        nbytes = sum(math.prod(max(size, 1) for size in spec.shape) * _dtype(spec).itemsize for spec in specs)
        if self.device == "cuda":
            most = self.allowed_bytes
        else:
            most = min(self.settings.limits.host_memory_bytes, int(_HOST_SHARE * linux.physical_bytes()))
        if nbytes > most:
            message = f"{what} makes tensors of {nbytes} bytes; at most {most} are possible here"
            raise EvaluationEnded(Category.REFERENCE_ERROR, message, Phase.REFERENCE)

    def _read(self, what: str, kind: type | tuple[type, ...]) -> Any:
        try:
            told = scalar_page.decode(self._page)
        except scalar_page.ScalarPageError as error:
            raise EvaluationEnded(Category.REFERENCE_ERROR, f"{what}: {error}", Phase.REFERENCE) from None
        if not isinstance(told, kind):
            raise EvaluationEnded(Category.REFERENCE_ERROR, f"{what} told {type(told).__name__}", Phase.REFERENCE)
        return told

    def _order(self, order: Order, *, what: str, optional: bool = False, **arguments: Any) -> Reply:
        """Give an order within the reference's deadline."""
        with self._within_deadline(), self._blaming(what, optional=optional):
            return self.process.order(order, **arguments)

    @contextlib.contextmanager
    def _within_deadline(self) -> Generator[None]:
        """Let the reference's deadline hold for what is ordered meanwhile, and take that from the time that is left."""
        if self.process.phase is not Phase.REFERENCE:
            self.process.enter(Phase.REFERENCE, max(self.left_s, _LEAST_S))
        waited_s = self.process.waited_s
        try:
            yield
        finally:
            self.left_s = max(self.left_s - (self.process.waited_s - waited_s), 0.0)

    def _ask_all(self, questions: Sequence[_Question]) -> list[Reply | EvaluationEnded]:
        """Ask questions at once; return the reply to each, or what became of it, while the process lives."""
        if not questions:
            return []
        asks = tuple(question.ask() for question in questions)
        with self._within_deadline(), self._blaming("Model.forward"):
            replies = self.process.order_each(Order.ANSWER, len(asks), payload=asks)
        return [self._blamed(reply, ask) for reply, ask in zip(replies, asks, strict=True)]

    def _blamed(self, reply: Reply | EvaluationEnded, ask: Ask) -> Reply | EvaluationEnded:
        """Return the reply to a question, or what became of it as the problem's failure or the fleet's."""
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
        """Give a process that was taken over all the time that a new one has."""
        self.left_s = self.settings.deadlines.reference_s
        self.process.enter(Phase.REFERENCE, self.left_s)
        self.process.allow_compilers(self.settings.deadlines.compile_s)

    def keep(self, key: str, memo: dict[str, Any], wanted: Path) -> None:
        """Leave the process to a later evaluation of the same problem and settings.

        Args:
            key, memo, wanted: as for :meth:`SealedProcess.leave`.

        Raises:
            EvaluationEnded: it did not come to rest.
            ForkServerError: the fork server is gone.
        """
        self.process.enter(Phase.CLEANUP, _REST_S)
        self.process.allow_compilers(0.0)
        self.process.order(Order.REST)
        self.process.count_cpu()
        self.process.leave(key, memo, wanted)


@dataclass(frozen=True, slots=True)
class _Question:
    """What a reference is asked of a case: its answer, or that in float64, on inputs that are moved a little."""

    case: Case
    nudge: float = 0.0
    wide: bool = False
    afresh: bool = False

    def ask(self) -> Ask:
        """Return the question as it travels."""
        slot, seed = self.case.slot, self.case.seed
        assert slot is not None
        return Ask(slot, seed, self.wide, self.nudge, secrets.randbits(63) if self.nudge else 0, afresh=self.afresh)


@dataclass(slots=True)
class _Answer:
    """What a reference has said to a case, and in float64, and in float64 on inputs that are moved a little."""

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
