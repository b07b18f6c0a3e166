"""Cache of the cases that a problem's process holds until the judge releases them.

The judge sends seeds, and the process draws inputs. A case that is needed again is drawn again from the same seed.
"""

from __future__ import annotations

import itertools
import re
import secrets
import sys
from collections.abc import Callable, Sequence
from typing import Final

import torch

from kqueue.contract import Comparison
from workers.judge.channel.arena import taken_by
from workers.judge.channel.arguments import FORM, STEADY, ArgumentsError, check
from workers.judge.channel.layout import checked
from workers.judge.channel.orders import Draw, Order, Release
from workers.judge.channel.protocol import Answer
from workers.judge.channel.randomness import REGIONS
from workers.judge.channel.tensors import MAX_DIMS, MAX_TENSORS, TensorSpec
from workers.judge.ending import EvaluationEnded
from workers.judge.pipeline import choices, static
from workers.judge.pipeline.blame import invalid_problem
from workers.judge.pipeline.cases import GIVEN, Case
from workers.judge.pipeline.proxy import ReferenceProxy, bytes_of

#: Maximum number of input sets drawn by one order, and their maximum size in bytes. On a GPU each order costs
#: context switches, which small problems would notice.
_MOST_SETS: Final = 16
_PREPARED_BYTES: Final = 64 << 20
#: Maximum size in bytes of the inputs and outputs of all cases together for them to be held at the same time.
_ROOMY_BYTES: Final = 256 << 20
#: Number of imported pieces of the process's memory above which the judge closes them and clears the process.
_MANY_RUNS: Final = 128
#: Share of the reference's deadline after which no further variants are made and answered.
_LATE: Final = 1 / 2
#: Size in bytes of inputs whose variants a CPU draws in a few milliseconds, so that the GPU is not needed.
_QUICK_BYTES: Final = 8 << 20
#: Source of references that check the domain of values on the device, or use values as indices. Values out of their
#: range, or all nearly equal, could fail a device assertion, after which the CUDA context is unusable.
_BOUND_TO_ITS_INPUTS: Final = re.compile(
    r"BCELoss|binary_cross_entropy(?!_with_logits)|multinomial|bernoulli|poisson|\.(long|int|short|byte)\("
    r"|torch\.(u?int\d*|long|short)\b"
)
#: Numbers of input sets and output sets that an arena holds: prepared sets, cases and verified calls. An output in
#: float64 takes as much as two sets, and so does the float64 output for nudged inputs.
_ARENA_INPUTS: Final = 80
_ARENA_OUTPUTS: Final = 144


class CaseCache:
    """Input sets of a problem, held by its process.

    Attributes:
        is_roomy: True if all cases are held at the same time. Otherwise one is held, and each is drawn when it is
            needed.
        leaves: True if the process frees a case as soon as the judge has copied it, because it is large.
        is_bound: True if variants could make the reference fail an assertion of the device, except for some kinds.
        has_varied: True after a variant was drawn.
        input_specs: specifications of the tensors among the inputs of one call, empty before the first draw.
        noise: relative distance, for each output that is no buffer, between two reference outputs whose inputs differ
            by rounding errors. Empty until it is measured. All cases share this list.
        check: the check that comes with the problem, if it decides (:attr:`.Case.check`).
    """

    def __init__(self, proxy: ReferenceProxy) -> None:
        """Hold nothing yet."""
        self.is_roomy = self.leaves = False
        self.input_specs: tuple[TensorSpec, ...] = ()
        self.noise: list[float] = []
        self.check: Callable[[Case, Sequence[torch.Tensor]], str] | None = None
        self._proxy = proxy
        self._process = proxy.process
        self._form = proxy.form
        self._settings = proxy.settings
        self._tolerance = static.tolerance(proxy.source)
        self._selects = choices.selection(proxy.source)
        self.is_bound = _BOUND_TO_ITS_INPUTS.search(proxy.source) is not None
        self.has_varied = False
        self._on_device: bool | None = None
        #: Number of sets drawn by one order.
        self._sets_per_draw = 1
        #: Cases with inputs, prepared cases, and cases to release with the next draw.
        self._held: set[Case] = set()
        self._ready: list[Case] = []
        self._over: list[Case] = []
        self._slots = itertools.count()

    @property
    def input_bytes(self) -> int:
        """Size of the inputs of one call in bytes."""
        return sum(map(bytes_of, self.input_specs))

    @property
    def is_large(self) -> bool:
        """True if the inputs are large enough to be drawn on a GPU."""
        return self.input_bytes > _QUICK_BYTES

    @property
    def most_prepared(self) -> int:
        """Maximum number of input sets that are drawn ahead of time."""
        return _PREPARED_BYTES // max(self.input_bytes, 1)

    @property
    def is_late(self) -> bool:
        """True if the deadline leaves no time for further variants."""
        return self._proxy.left_s < _LATE * self._settings.deadlines.reference_s

    @property
    def varies(self) -> bool:
        """True if kernels must answer variants too. A request's own tolerance fits only the given inputs."""
        return self._settings.comparison is Comparison.STRICT and self._settings.given_tolerance is None

    def first(self) -> Case:
        """Draw and return a given case, which determines the form of a call's inputs.

        Large inputs are drawn on the device, because a CPU would take long.

        Raises:
            EvaluationEnded: ``invalid_problem``, ``reference_error`` or ``reference_timeout``.
        """
        if self._proxy.device == "cuda":
            first = self.new(on_device=True)
            if self._try_on_device(first):
                if self.is_large:
                    return first
                self.drop([first])
        first = self.new()
        self.draw([first])
        return first

    def warm_up_variants(self) -> None:
        """Load the code that draws variants on the device, if the problem gets only the variants for any size.

        This takes about 0.2 s, and neither the exclusive device nor much of its memory.

        Raises:
            EvaluationEnded: the process has ended.
        """
        if self._on_device and self.varies and (self._settings.checks + 1) * self.input_bytes > _ROOMY_BYTES:
            try:
                self._proxy.order(Order.WARM_UP, what="get_inputs()", optional=True)
            except EvaluationEnded:
                if self._process.ended is not None:
                    raise

    def plan(self, first: Case) -> None:
        """Decide by the size of the first answered case how many cases are held and drawn together."""
        most = min(_MOST_SETS, self.most_prepared, MAX_TENSORS // max(len(self.input_specs), 1))
        self.is_roomy = (self._settings.checks + 1) * first.nbytes <= _ROOMY_BYTES
        self.leaves = self._proxy.device == "cpu" and first.nbytes > _ROOMY_BYTES and self.check is None
        self._sets_per_draw = max(1, most) if self.is_roomy else 1

    def wanted_arena(self) -> int:
        """Return the size in bytes of an arena that holds all small tensors of an evaluation."""
        both = self.input_specs, self._form.output_specs
        inputs, outputs = (sum(taken_by(bytes_of(spec)) for spec in specs) for specs in both)
        return _ARENA_INPUTS * inputs + _ARENA_OUTPUTS * outputs

    def new(self, kind: str = GIVEN, *, drawn: int | None = None, on_device: bool = False) -> Case:
        """Return a case that is not drawn yet."""
        drawn = secrets.randbits(63) if drawn is None else drawn
        case = Case(secrets.randbits(63), drawn, on_device, kind, self._tolerance, noise=self.noise, form=self._form)
        case.selects, case.check = self._selects, self.check
        return case

    def given(self, count: int, *, on_device: bool) -> list[Case]:
        """Draw and return given cases."""
        cases = [self.new(on_device=on_device) for _ in range(count)]
        self._draw_together(cases)
        return cases

    def vary(self, given: Case, kinds: Sequence[str], most: int = sys.maxsize) -> list[Case]:
        """Draw and return the first variants of a given case that exist, at most ``most``."""
        made: list[Case] = []
        on_device = self.is_large and self._may_draw_on_device()
        for kind in kinds:
            if len(made) == most or self.is_late:
                break
            case = self.new(kind, drawn=given.drawn, on_device=on_device)
            try:
                if self.draw([case]):
                    made.append(case)
            except EvaluationEnded:
                if self._process.ended is not None:
                    raise
        return made

    def variant(self, case: Case, kind: str, *, position: int = 0, beside: bool = False) -> Case | None:
        """Draw and return a variant of a given case with the same forward seed, or None if there is no such variant.

        Args:
            position: position of the number that differs, for kinds with one.
            beside: True to keep the other cases even where cases are held one at a time.
        """
        varied = self.new(kind, drawn=case.drawn, on_device=case.on_device)
        varied.seed, varied.position = case.seed, position
        may_vary = not self.is_bound or kind in REGIONS
        return varied if may_vary and self.draw([varied], beside=beside) else None

    def fresh(self) -> Case:
        """Return another input set without an answer, and release the set that was returned before."""
        if not self._ready:
            self._draw_next()
        case = self._ready.pop()
        self._over.append(case)
        return case

    def stock(self, count: int) -> None:
        """Draw at least ``count`` input sets for :meth:`fresh` ahead of time, if cases are held together."""
        while self.is_roomy and len(self._ready) < min(count, self.most_prepared):
            self._draw_next()

    def _draw_next(self) -> None:
        on_device = self._may_draw_on_device()
        cases = [self.new(on_device=on_device) for _ in range(self._sets_per_draw)]
        released, self._over = self._over, []
        self.draw(cases, free=released)
        self._ready += cases

    def another(self) -> Case:
        """Return another input set without an answer, which is held until :meth:`drop`."""
        case = self.new(on_device=self._may_draw_on_device())
        self.draw([case])
        return case

    def again(self, drawn: int, seed: int, *, on_device: bool = False) -> Case:
        """Return a case that was drawn before, to be drawn again from the same seeds."""
        case = self.new(drawn=drawn, on_device=on_device)
        case.seed = seed
        return case

    def present(self, case: Case, *, beside: bool = False) -> None:
        """Draw a case's inputs unless the process holds them. See :meth:`draw`."""
        if case.slot is None:
            self.draw([case], beside=beside)

    def draw_anew(self, case: Case) -> Case:
        """Draw a case again from the same seeds, in the form that inputs have from now on."""
        self.drop([case])
        self._form.arguments = None
        again = self.again(case.drawn, case.seed, on_device=case.on_device)
        self.draw([again])
        return again

    def drop(self, cases: Sequence[Case]) -> None:
        """Release the inputs and outputs of cases."""
        self._release([slot for case in cases if (slot := self._forget(case)) is not None])

    def leave(self, cases: Sequence[Case]) -> None:
        """Have the process free large cases of which the judge has its own copies, until they are needed again."""
        held = [case for case in cases if self.leaves and case.slot is not None]
        slots = [case.slot for case in held if case.slot is not None]
        for case in held:
            case.slot = None
        self._release(slots)

    def _release(self, slots: Sequence[int]) -> None:
        if slots:
            self._proxy.exchange.settle()
            self._proxy.order(Order.RELEASE, what="get_inputs()", payload=Release(tuple(slots)))

    def clear(self) -> None:
        """Release all cases and free the process's unused memory."""
        self.forget()
        self._proxy.exchange.settle()
        self._proxy.order(Order.RELEASE, what="get_inputs()", payload=Release(all=True))
        self._process.imports.close()
        self._proxy.free_arena()
        if self._proxy.device == "cuda":
            torch.cuda.empty_cache()

    def forget(self) -> None:
        """Clear the tensors of all cases before the process frees them."""
        for case in list(self._held):
            self._forget(case)
        self._ready, self._over = [], []

    def _forget(self, case: Case) -> int | None:
        """Clear a case's tensors before the process releases them, and return its slot, if it has one."""
        slot, case.slot = case.slot, None
        case.inputs, case.outputs, case.exact, case.unproven, case.again = [], [], None, None, None
        case.moved = tuple
        self._held.discard(case)
        return slot

    def _may_draw_on_device(self) -> bool:
        """Return whether ``get_inputs()`` makes the same form of inputs with the GPU as torch's default device."""
        if self._on_device is None and self._proxy.device == "cuda":
            case = self.new(on_device=True)
            if self._try_on_device(case):
                self.drop([case])
        return self._on_device is True

    def _try_on_device(self, case: Case) -> bool:
        """Draw a case with the GPU as torch's default device, and return whether that succeeded."""
        try:
            self.draw([case])
            self._on_device = True
        except EvaluationEnded:
            self._on_device = False
            if self._process.ended is not None:
                raise
        return self._on_device

    def draw_missing(self, cases: Sequence[Case]) -> None:
        """Draw the given cases that are not held, several with one order."""
        for on_device in (False, True):
            self._draw_together([c for c in cases if c.slot is None and c.kind == GIVEN and c.on_device is on_device])

    def _draw_together(self, cases: Sequence[Case]) -> None:
        for begin in range(0, len(cases), self._sets_per_draw):
            self.draw(cases[begin : begin + self._sets_per_draw])

    def draw(self, cases: Sequence[Case], *, free: Sequence[Case] = (), beside: bool = False) -> bool:
        """Draw the inputs of cases of one kind. Return False if the problem has no variant of that kind.

        Args:
            free: cases to release with this order.
            beside: True to keep the other cases even where cases are held one at a time.
        """
        kind = cases[0].kind
        if not self.is_roomy and not beside:
            # Cases that cannot be held together replace those that are held.
            if len(self._process.imports) > _MANY_RUNS:
                self.clear()
            free = [case for case in self._held if case not in cases]
        self._proxy.exchange.settle()
        slots = tuple(next(self._slots) for _ in cases)
        order = Draw(
            slots,
            tuple(case.drawn for case in cases),
            cases[0].on_device,
            "" if kind == GIVEN else kind,
            free=tuple(slot for case in free if (slot := self._forget(case)) is not None),
            position=cases[0].position,
        )
        reply = self._proxy.order(Order.DRAW, what="get_inputs()", payload=order)
        if reply.answer is Answer.MISMATCH and kind != GIVEN:
            return False
        self.has_varied |= kind != GIVEN
        self._check_form(reply.tensors, len(slots))
        every = self._proxy.tensors(reply.tensors, reply.locations, "get_inputs()")
        count = len(self.input_specs)
        for i, (slot, case) in enumerate(zip(slots, cases, strict=True)):
            case.slot, case.inputs, case.views = slot, every[i * count : (i + 1) * count], self._form.views
            self._held.add(case)
        return True

    def _check_form(self, specs: tuple[TensorSpec, ...], sets: int) -> None:
        """Check the form of drawn input sets, and record the form of the first one."""
        form = self._proxy.read("get_inputs()", dict)
        try:
            arguments, views = form["arguments"], checked(form["views"], specs[: len(specs) // sets])
            if check(arguments) != len(views):
                raise ArgumentsError("another number of tensors than it reported")
        except (KeyError, TypeError, ValueError) as error:
            raise invalid_problem(f"{FORM}; it returned {error}") from None
        if any(spec.dtype is None or len(spec.shape) > MAX_DIMS for spec in specs):
            raise invalid_problem(
                f"at most {MAX_TENSORS} dense input tensors of {MAX_DIMS} dimensions and known dtypes"
            )
        self._proxy.check_size(specs, "get_inputs()")
        if self._form.arguments is None:
            self._form.arguments, self._form.views, self.input_specs = arguments, views, specs
        same = repr(arguments) == repr(self._form.arguments) and views == self._form.views
        if not same or specs != self.input_specs * sets:
            raise invalid_problem(STEADY)
