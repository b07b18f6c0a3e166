"""The reference: loading it, making inputs, and the outputs that a kernel must agree with.

The problem's code runs in the judge, under a deadline that the kernel of the operating system enforces (an
alarm that ends the process, whatever it is executing). Its failures are the problem's, never a kernel's.
"""

from __future__ import annotations

import contextlib
import copy
import linecache
import math
import random
import re
import secrets
import sys
import time
import traceback
import types
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final

import torch

from kqueue.categories import Category
from kqueue.contract import Comparison, Phase, Precision, Settings
from workers.judge.channel.protocol import MAX_DIMS, MAX_STRUCTURE_BYTES, MAX_TENSORS, TensorSpec, describe
from workers.judge.channel.randomness import set_seed
from workers.judge.trial.ending import EvaluationEnded
from workers.judge.trial.variants import MAX_BYTES, variants

DTYPES: Final = {
    Precision.FP32: torch.float32,
    Precision.FP16: torch.float16,
    Precision.BF16: torch.bfloat16,
}
#: Types of arguments that may stand beside tensors in ``get_inputs()``.
_SCALARS: Final = (int, float, bool, str, type(None))
_FILE: Final = "<problem>"
#: The kind of cases that come from the problem's own ``get_inputs()``.
GIVEN: Final = "given"
#: KernelBench's tolerance by an evaluation's precision, absolute and relative alike.
CLOSE: Final = {Precision.FP32: 1e-4, Precision.FP16: 1e-2, Precision.BF16: 1e-2}
#: What a reference does with values whose domain is checked on the device, or that it takes for indices: values
#: unlike its own could end in an assertion there, which nothing survives that uses the device.
_BOUND_TO_ITS_INPUTS: Final = re.compile(
    r"BCELoss|binary_cross_entropy(?!_with_logits)|multinomial|bernoulli|poisson|\.(long|int|short|byte)\("
    r"|torch\.(u?int\d*|long|short)\b"
)
#: The reference in float64 is run only where the reference took less than this, in seconds.
_QUICK_S: Final = {"cuda": 0.003, "cpu": 0.05}
#: How long it may take, all calls together, in seconds.
_BUDGET_S: Final = {"cuda": 0.1, "cpu": 1.0}
#: What of a first call goes into loading a GPU's kernels, at most, in seconds.
_COLD_S: Final = 0.5
#: The share of a GPU's free memory that it may take; on a CPU, so many bytes.
_MEMORY_SHARE: Final = 1 / 8
_HOST_BYTES: Final = 512 << 20
#: How much of its outputs is kept, in bytes.
_KEPT_BYTES: Final = {"cuda": 2 << 30, "cpu": 256 << 20}
#: What torch may keep of a GPU's memory for later, in bytes: the candidate needs some too.
_CACHED_BYTES: Final = 1 << 30
#: How far the reference may lie from itself in float64, as a share of its size: for that to tell anything, and for
#: a variant to count.
_RELATED: Final = {Precision.FP32: 1e-2, Precision.FP16: 0.25, Precision.BF16: 0.25}
_PRECISE: Final = {Precision.FP32: 1e-3, Precision.FP16: 3e-2, Precision.BF16: 3e-2}
#: Changes of a value that no kernel need tell from none.
_ROUNDING: Final = {Precision.FP32: 2**-25, Precision.FP16: 2**-15, Precision.BF16: 2**-12}


@dataclass(slots=True)
class Case:
    """One input set and what the reference makes of it.

    Attributes:
        seed: set before the reference's and the candidate's forward alike, so that randomness agrees.
        inputs: the tensors among the arguments, on the device, in the judge's own memory.
        outputs: the reference's output tensors; empty until :meth:`Problem.answer`.
        exact: the same from the reference in float64, where that could be had.
        kind: ``given``, from the problem's own ``get_inputs()``, or the name of a variant of such inputs.
    """

    seed: int
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    exact: list[torch.Tensor] | None = None
    kind: str = GIVEN


class Problem:
    """A loaded reference.

    Attributes:
        arguments: of ``forward``, None in the tensors' places; known from the first case on, as are
        places: the positions of the tensors among them.
        structure: the outputs' arrangement; known from the first answer on, as is
        output_aliases: for each output, the number of the input whose memory it shares, else None.
        mutates_inputs: whether the reference has changed an input.
        forward_s: the shortest that a forward of the reference took, in seconds.
        reference_is_constant: whether the answers to all given cases, at least two, were the same.
    """

    def __init__(self, source: str, settings: Settings, device: str) -> None:
        """Execute the source and make the constructor's arguments.

        Raises:
            EvaluationEnded: ``invalid_problem`` or ``reference_error``.
        """
        self.settings = settings
        self.device = device
        self.dtype = DTYPES[settings.precision]
        module = types.ModuleType("problem")
        linecache.cache[_FILE] = (len(source), None, source.splitlines(keepends=True), _FILE)
        try:
            code = compile(source, _FILE, "exec")
        except (SyntaxError, ValueError) as error:
            raise _invalid(f"the problem's source is not valid Python: {error}") from None
        _blame_reference(lambda: exec(code, module.__dict__), "importing the problem")  # noqa: S102
        self._model_class = getattr(module, "Model", None)
        self._get_inputs = getattr(module, "get_inputs", None)
        get_init_inputs = getattr(module, "get_init_inputs", None)
        if not (isinstance(self._model_class, type) and issubclass(self._model_class, torch.nn.Module)):
            raise _invalid("the problem defines no class Model derived from torch.nn.Module")
        if not callable(self._get_inputs):
            raise _invalid("the problem defines no function get_inputs()")
        torch.manual_seed(settings.seed)
        arguments = _blame_reference(get_init_inputs, "get_init_inputs()") if callable(get_init_inputs) else []
        if not isinstance(arguments, (list, tuple)):
            raise _invalid("get_init_inputs() must return a list")
        self.init_inputs: list[Any] = list(arguments)
        self.arguments: tuple[Any, ...] = ()
        self.places: tuple[int, ...] = ()
        self.structure = ""
        self.mutates_inputs = False
        self.output_aliases: tuple[int | None, ...] = ()
        self.written_bytes = 0
        self.forward_s = math.inf
        self._on_device: bool | None = None
        self._model: torch.nn.Module | None = None
        #: The model in float64, for as long as it may be of use.
        self._wide: torch.nn.Module | None = None
        self._wide_left = _BUDGET_S[device]
        self._wide_cold = device == "cuda"
        self._kept = 0
        self._may_vary = _BOUND_TO_ITS_INPUTS.search(source) is None
        self._first: Case | None = None
        self._same_answers: bool | None = None
        self._specs: list[TensorSpec] = []
        self._output_specs: list[TensorSpec] = []

    def construct(self) -> None:
        """Construct the reference's model on the device, under the seed that the candidate will have too."""

        def make() -> torch.nn.Module:
            arguments = [self._place(value) for value in self.init_inputs]
            torch.manual_seed(self.settings.seed)
            model: torch.nn.Module = self._model_class(*arguments)  # pyright: ignore[reportOptionalCall]
            torch.manual_seed(self.settings.seed)
            return model.to(device=self.device, dtype=self.dtype)

        with torch.no_grad():
            model: torch.nn.Module = _blame_reference(make, "Model(*get_init_inputs())")
        self._model, self._wide = model, self._widened(model)

    def make_cases(self, most_bytes: float = math.inf) -> list[Case]:
        """As many given cases as the settings ask for, each from a seed that nobody else knows, and variants.

        Args:
            most_bytes: what the inputs may take; where they would take more only the first case is made.

        Raises:
            EvaluationEnded: ``invalid_problem`` or ``reference_error``.
        """
        given = [self._make_case(self._draw(on_device=False))]
        first = given[0].inputs
        if self.settings.checks * sum(tensor.nbytes for tensor in first) > most_bytes:
            return given
        given += [self._make_case(self._draw(on_device=False)) for _ in range(self.settings.checks - 1)]
        # An evaluation's own tolerance was chosen for the given inputs.
        wanted = self.settings.comparison is Comparison.STRICT and self.settings.tolerance is None
        if not (wanted and self._may_vary and self._wide is not None):
            return given
        if sum(tensor.nbytes for tensor in first) > MAX_BYTES[self.device]:
            return given
        set_seed(secrets.randbits(63))
        varied = variants(first)
        return given + [Case(secrets.randbits(63), inputs, [], kind=kind) for kind, inputs in varied.items()]

    def fresh(self) -> Case:
        """One more input set of the problem's own, unanswered, made on the device itself where its code allows.

        Raises:
            EvaluationEnded: ``invalid_problem`` or ``reference_error``.
        """
        if self._on_device is None:
            self._on_device = self.device == "cuda" and self._draws_on_device()
        return self._make_case(self._draw(on_device=self._on_device))

    def _draws_on_device(self) -> bool:
        """Whether ``get_inputs()`` makes the same kind of inputs with the device as torch's default."""
        try:
            self._make_case(self._draw(on_device=True))
        except (EvaluationEnded, torch.OutOfMemoryError):
            return False
        return True

    def _draw(self, *, on_device: bool) -> Any:
        """What ``get_inputs()`` returns from a seed that nobody else knows; made on the device unless it says where."""
        set_seed(secrets.randbits(63))
        random.seed(secrets.randbits(64))
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(secrets.randbits(32))
        with torch.device(self.device) if on_device else contextlib.nullcontext():
            return _blame_reference(self._get_inputs, "get_inputs()")  # pyright: ignore[reportArgumentType]

    def _make_case(self, values: Any) -> Case:
        if not isinstance(values, (list, tuple)):
            raise _invalid("get_inputs() must return a list")
        places = tuple(i for i, value in enumerate(values) if type(value) is torch.Tensor)
        others = tuple(None if i in places else value for i, value in enumerate(values))
        for value in others:
            if not isinstance(value, _SCALARS):
                raise _invalid(f"get_inputs() may hold tensors, numbers, strings and None, not {type(value).__name__}")
        # Tensors that share memory mean one thing: they must not come to differ.
        if len({values[i].untyped_storage().data_ptr() for i in places}) < len(places):
            self._may_vary = False
        tensors = [self._place(values[i]) for i in places]
        if len(tensors) > MAX_TENSORS or any(t.dim() > MAX_DIMS or not _known(t) for t in tensors):
            raise _invalid(f"at most {MAX_TENSORS} dense input tensors of {MAX_DIMS} dimensions and known dtypes")
        if not self.arguments:
            self.arguments, self.places = others, places
            self._specs = [TensorSpec.of(tensor) for tensor in tensors]
        elif others != self.arguments or self._specs != [TensorSpec.of(tensor) for tensor in tensors]:
            raise _invalid("get_inputs() must return the same shapes, dtypes and scalars each time")
        return Case(secrets.randbits(63), tensors, [])

    def answer(self, case: Case) -> bool:
        """Run the reference on a case and keep its outputs, and those of the reference in float64 where it may.

        Returns:
            whether it answered. False only for a variant: its inputs may lie outside the problem's domain. It
            counts only if the reference in float64 agrees, and stays where it was when the inputs change by less
            than a rounding error: else a right kernel could answer otherwise.

        Raises:
            EvaluationEnded: ``invalid_problem`` or ``reference_error``; for given cases only.
        """
        if case.kind == GIVEN:
            random_forward = self._answer(case)
            self._add_exact(case, random_forward)
            self._note(case)
            return True
        if self._wide is None:
            return False
        try:
            random_forward = self._answer(case)
        except (EvaluationEnded, torch.OutOfMemoryError):
            return False
        self._add_exact(case, random_forward)
        return case.exact is not None and self._is_steady(case, case.exact)

    def allow_exact(self) -> None:
        """Give float64 answers as much time again as they had at first."""
        self._wide_left = _BUDGET_S[self.device]

    @property
    def reference_is_constant(self) -> bool:
        """Whether the answers to all given cases, at least two, were the same within the tolerance."""
        return self._same_answers is True

    def _answer(self, case: Case) -> bool:
        """As :meth:`answer`, without the float64 reference; returns whether the forward drew random numbers."""
        drew = False
        arguments: list[Any] = []

        def forward() -> Any:
            nonlocal drew, arguments
            arguments = self._arguments(case.inputs)
            set_seed(case.seed)
            before = self._random_state()
            begun = time.perf_counter()
            with torch.no_grad():
                output = self._model(*arguments)  # pyright: ignore[reportOptionalCall]
            self._settle()
            self.forward_s = min(self.forward_s, time.perf_counter() - begun)
            drew = not torch.equal(before, self._random_state())
            return output

        output = _blame_reference(forward, "Model.forward")
        if self.device == "cuda" and _QUICK_S["cuda"] < self.forward_s < _COLD_S and self._first is None:
            output = _blame_reference(forward, "Model.forward")
        structure, leaves = describe(output)
        if "?" in structure or not leaves or len(leaves) > MAX_TENSORS:
            raise _invalid(f"the reference must return 1 to {MAX_TENSORS} tensors, not {structure}")
        if len(structure.encode()) > MAX_STRUCTURE_BYTES:
            raise _invalid(
                f"the arrangement of the reference's outputs takes more than {MAX_STRUCTURE_BYTES} bytes to tell"
            )
        if any(leaf.device.type != self.device or leaf.dim() > MAX_DIMS or not _known(leaf) for leaf in leaves):
            raise _invalid(f"the reference's outputs must be dense tensors on {self.device} of known dtypes")
        if any(leaf.is_floating_point() and bool(torch.isnan(leaf).any()) for leaf in leaves):
            raise _invalid("the reference's output holds NaN, so nothing can agree with it")
        if self.structure and structure != self.structure:
            raise _invalid("the reference must return the same structure each time")
        specs = [TensorSpec.of(leaf) for leaf in leaves]
        changed = [arguments[place] for place in self.places]
        if not self.structure:
            self.structure, self._output_specs = structure, specs
            owners = {tensor.untyped_storage().data_ptr(): i for i, tensor in reversed(list(enumerate(changed)))}
            owners.pop(0, None)  # the address of all storages that hold nothing
            self.output_aliases = tuple(owners.get(leaf.untyped_storage().data_ptr()) for leaf in leaves)
            self.written_bytes = self._written(leaves, set(owners))
        if specs != self._output_specs:
            raise _invalid("the reference must return the same shapes and dtypes each time")
        # An output may be an input, or a view of one: what is compared must be the judge's own.
        case.outputs = [leaf.detach().clone(memory_format=torch.contiguous_format) for leaf in leaves]
        self.mutates_inputs |= any(not same_bits(a, b) for a, b in zip(changed, case.inputs, strict=True))
        return drew

    def _written(self, leaves: list[torch.Tensor], owned: set[int]) -> int:
        """Bytes that the outputs take which are neither inputs nor weights, each memory counted once."""
        model = self._model
        assert model is not None
        kept = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        sizes: dict[int, int] = {}
        for leaf in leaves:
            where = leaf.untyped_storage().data_ptr()
            if where not in owned | kept:
                sizes[where] = max(sizes.get(where, 0), min(leaf.nbytes, leaf.untyped_storage().nbytes()))
        return sum(sizes.values())

    def _arguments(self, inputs: list[torch.Tensor]) -> list[Any]:
        """Forward's arguments, tensors copied."""
        arguments = list(self.arguments)
        for place, tensor in zip(self.places, inputs, strict=True):
            arguments[place] = tensor.clone()
        return arguments

    def _note(self, case: Case) -> None:
        """Compare the answer to a given case with that to the first."""
        if self._first is None:
            self._first = case
        elif self._same_answers is not False:
            share = CLOSE[self.settings.precision]
            pairs = zip(case.outputs, self._first.outputs, strict=True)
            self._same_answers = all(_distance(a, b) <= share * _size(b) for a, b in pairs)

    def _add_exact(self, case: Case, random_forward: bool) -> None:
        """Keep the float64 reference's outputs, if they can be had in time and memory and are the same function's."""
        if random_forward:
            self._wide = None  # its random numbers are others in float64
        if self.forward_s > _QUICK_S[self.device]:
            return
        exact = self._run_wide(case.seed, case.inputs)
        if exact is None:
            return
        related = self._is_precise(case, exact) if case.kind != GIVEN else self._is_related(case, exact)
        if related:
            case.exact = exact
            self._kept += sum(tensor.nbytes for tensor in exact)
        elif case.kind == GIVEN:
            self._wide = None

    def _is_related(self, case: Case, exact: list[torch.Tensor]) -> bool:
        """Whether the reference's outputs are a less precise form of the exact ones, be they rounding errors only."""
        share, close = _RELATED[self.settings.precision], CLOSE[self.settings.precision]
        return all(
            (distance := _distance(own, wide)) <= share * _size(wide) or distance <= close * own.numel() ** 0.5
            for own, wide in zip(case.outputs, exact, strict=True)
            if own.is_floating_point() or own.is_complex()
        )

    def _is_precise(self, case: Case, exact: list[torch.Tensor]) -> bool:
        """Whether the reference's outputs for a variant are near the exact ones, and far from overflowing."""
        share = _PRECISE[self.settings.precision]
        return all(
            # Not so indices: those of equal values may be any.
            (own.is_floating_point() or own.is_complex())
            and _is_tame(own)
            and _distance(own, wide) <= share * _size(wide)
            for own, wide in zip(case.outputs, exact, strict=True)
        )

    def _is_steady(self, case: Case, exact: list[torch.Tensor]) -> bool:
        """Whether inputs that differ by less than a rounding error have the same answer: not so at ties and steps."""
        rounding, close = _ROUNDING[self.settings.precision], CLOSE[self.settings.precision]
        set_seed(secrets.randbits(63))
        moved = self._run_wide(case.seed, [_moved(tensor, rounding) for tensor in case.inputs])
        if moved is None:
            return False
        pairs = [(a, b, b.abs()) for a, b in zip(moved, exact, strict=True) if b.numel()]
        return all(bool(((a - b).abs() <= close * (size + size.square().mean().sqrt())).all()) for a, b, size in pairs)

    def _widened(self, model: torch.nn.Module) -> torch.nn.Module | None:
        """The model in float64, or None where memory is short or it cannot be had."""
        weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        if not self._fits(weights * 8 // self.dtype.itemsize):
            return None
        try:
            wide = copy.deepcopy(model).double()
            for module in wide.modules():
                for name, value in vars(module).items():
                    if isinstance(value, torch.Tensor) and value.is_floating_point():
                        setattr(module, name, value.double())
        except Exception:  # noqa: BLE001 -- the problem's own code may be run by copying
            return None
        return wide

    def _run_wide(self, seed: int, inputs: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """What the float64 reference answers; None where it cannot, or would take too much memory or time."""
        if self._wide is None:
            return None
        numbers = sum(tensor.numel() for tensor in inputs) + sum(math.prod(s.shape) for s in self._output_specs)
        if self._wide_left <= 0 or self._kept > _KEPT_BYTES[self.device] or not self._fits(4 * 8 * numbers):
            return None
        begun = time.perf_counter()
        try:
            with torch.no_grad(), _default_dtype(torch.float64):
                arguments = self._arguments([_widen(tensor) for tensor in inputs])
                torch.manual_seed(seed)
                structure, leaves = describe(self._wide(*arguments))
            self._settle()
        except torch.AcceleratorError:
            raise
        except Exception:  # noqa: BLE001 -- the problem was not written for float64
            self._wide = None
            return None
        took = time.perf_counter() - begun
        self._wide_left -= max(0.0, took - _COLD_S) if self._wide_cold else took
        self._wide_cold = False
        self._give_back()
        if structure != self.structure or not all(map(_is_wide_of, leaves, self._output_specs)):
            self._wide = None
            return None
        return [leaf.detach().clone(memory_format=torch.contiguous_format) for leaf in leaves]

    def _give_back(self) -> None:
        """Leave the GPU's memory to the candidate that torch keeps for later."""
        if self.device == "cuda" and torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > _CACHED_BYTES:
            torch.cuda.empty_cache()

    def _fits(self, nbytes: int) -> bool:
        """Whether so much may be taken of the memory that is left."""
        if self.device == "cuda":
            unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            return nbytes < _MEMORY_SHARE * (torch.cuda.mem_get_info()[0] + unused)
        return nbytes < _HOST_BYTES

    def _random_state(self) -> torch.Tensor:
        """What changes when a forward draws random numbers."""
        state = torch.get_rng_state()
        return torch.cat((state, torch.cuda.get_rng_state())) if self.device == "cuda" else state

    def _settle(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _place(self, value: Any) -> Any:
        """A value on the device, floating tensors in the evaluation's precision."""
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().to(device=self.device, dtype=self.dtype if value.is_floating_point() else value.dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one spec hold the same bits, NaN included."""
    return bool(torch.equal(_bits(a), _bits(b)))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.contiguous()
    return dense.view(torch.uint8) if dense.dim() else dense.reshape(1).view(torch.uint8)


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    """Values in float64, or complex128; what is neither as it is."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _is_wide_of(leaf: torch.Tensor, spec: TensorSpec) -> bool:
    """Whether an output is what the reference in float64 would make of one of that spec."""
    assert spec.dtype is not None
    wanted = _widen(torch.empty(0, dtype=spec.dtype)).dtype
    return leaf.dtype == wanted and tuple(leaf.shape) == spec.shape and leaf.device.type == spec.device


def _moved(tensor: torch.Tensor, rounding: float) -> torch.Tensor:
    """Floating values in float64, each changed by about ``rounding``, within the range that they have."""
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor
    wide = tensor.double()
    low, high = wide.aminmax()
    typical = wide.square().mean().sqrt()
    return (wide + rounding * (wide * torch.randn_like(wide) + typical * torch.randn_like(wide))).clamp(low, high)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The norm of the difference, infinite if infinities differ."""
    wide = torch.complex128 if b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    return float(torch.linalg.vector_norm(torch.where(a == b, 0.0, a - b)).nan_to_num(math.inf))


def _size(tensor: torch.Tensor) -> float:
    """The norm of what is finite."""
    wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    return float(torch.linalg.vector_norm(torch.where(wide.isfinite(), wide, 0.0)))


def _is_tame(tensor: torch.Tensor) -> bool:
    """Whether all values are far from overflowing."""
    most = torch.finfo(tensor.dtype).max / 64
    return not tensor.numel() or bool((tensor.abs() < most).all())


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Generator[None]:
    """What torch makes of numbers meanwhile."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _known(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and TensorSpec.of(tensor).dtype is not None


def _others_hold_memory() -> bool:
    """Whether a tenth of the GPU's memory or more is in use by other processes."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved() > total // 10


def _invalid(message: str) -> EvaluationEnded:
    return EvaluationEnded(Category.INVALID_PROBLEM, message, Phase.REFERENCE)


def _blame_reference(call: Callable[[], Any], what: str) -> Any:
    try:
        return call()
    except torch.OutOfMemoryError:
        if _others_hold_memory():
            raise  # the device's trouble, not the problem's
        raise EvaluationEnded(
            Category.REFERENCE_ERROR, f"{what} needs more memory than the GPU has", Phase.REFERENCE
        ) from None
    except Exception as error:  # noqa: BLE001 -- the problem may raise anything
        raise EvaluationEnded(
            Category.REFERENCE_ERROR,
            f"{what} raised {type(error).__name__}: {error}",
            Phase.REFERENCE,
            exception=f"{type(error).__module__}.{type(error).__qualname__}",
            traceback="".join(traceback.format_exception(error)[-6:]),
        ) from None
