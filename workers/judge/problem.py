"""The reference: loading it, making inputs, and the outputs that a kernel must agree with.

The problem's code runs in the judge, under a deadline that the kernel of the operating system enforces (an
alarm that ends the process, whatever it is executing). Its failures are the problem's, never a kernel's.
"""

from __future__ import annotations

import linecache
import random
import secrets
import sys
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from kqueue.categories import Category
from kqueue.contract import Phase, Precision, Settings
from workers.channel.protocol import MAX_DIMS, MAX_TENSORS, TensorSpec, describe
from workers.judge.ending import EvaluationEnded

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
    """A loaded reference."""

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
        self._on_device: bool | None = None
        self._model: torch.nn.Module | None = None

    def construct(self) -> None:
        """Construct the reference's model on the device, under the seed that the candidate will have too."""

        def make() -> torch.nn.Module:
            arguments = [self._place(value) for value in self.init_inputs]
            torch.manual_seed(self.settings.seed)
            model: torch.nn.Module = self._model_class(*arguments)  # pyright: ignore[reportOptionalCall]
            torch.manual_seed(self.settings.seed)
            return model.to(device=self.device, dtype=self.dtype)

        with torch.no_grad():
            self._model = _blame_reference(make, "Model(*get_init_inputs())")

    def make_cases(self) -> list[Case]:
        """As many input sets as the settings ask for, each from a seed that nobody else knows.

        Raises:
            EvaluationEnded: ``invalid_problem`` or ``reference_error``.
        """
        return [self._make_case(self._draw("cpu")) for _ in range(self.settings.checks)]

    def fresh(self) -> Case:
        """One more input set of the problem's own, unanswered, made on the device itself where its code allows.

        Raises:
            EvaluationEnded: ``invalid_problem`` or ``reference_error``.
        """
        if self._on_device is None:
            self._on_device = self.device == "cuda" and self._draws_on_device()
        return self._make_case(self._draw(self.device if self._on_device else "cpu"))

    def _draws_on_device(self) -> bool:
        """Whether ``get_inputs()`` makes the same kind of inputs with the device as torch's default."""
        try:
            self._make_case(self._draw(self.device))
        except EvaluationEnded:
            return False
        return True

    def _draw(self, device: str) -> Any:
        """What ``get_inputs()`` returns from a seed that nobody else knows, torch's default device being ``device``."""
        torch.manual_seed(secrets.randbits(63))
        random.seed(secrets.randbits(64))
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(secrets.randbits(32))
        with torch.device(device):
            return _blame_reference(self._get_inputs, "get_inputs()")  # pyright: ignore[reportArgumentType]

    def _make_case(self, values: Any) -> Case:
        if not isinstance(values, (list, tuple)):
            raise _invalid("get_inputs() must return a list")
        places = tuple(i for i, value in enumerate(values) if type(value) is torch.Tensor)
        others = tuple(None if i in places else value for i, value in enumerate(values))
        for value in others:
            if not isinstance(value, _SCALARS):
                raise _invalid(f"get_inputs() may hold tensors, numbers, strings and None, not {type(value).__name__}")
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
        """Run the reference on a case and keep its outputs.

        Returns:
            whether it answered; False for a variant only, whose inputs it need not be made for.

        Raises:
            EvaluationEnded: ``invalid_problem`` or ``reference_error``.
        """
        arguments = list(self.arguments)
        for place, tensor in zip(self.places, case.inputs, strict=True):
            arguments[place] = tensor.clone()

        def forward() -> Any:
            torch.manual_seed(case.seed)
            with torch.no_grad():
                output = self._model(*arguments)  # pyright: ignore[reportOptionalCall]
            if self.device == "cuda":
                torch.cuda.synchronize()
            return output

        structure, leaves = describe(_blame_reference(forward, "Model.forward"))
        if "?" in structure or not leaves or len(leaves) > MAX_TENSORS:
            raise _invalid(f"the reference must return 1 to {MAX_TENSORS} tensors, not {structure}")
        if any(leaf.device.type != self.device or leaf.dim() > MAX_DIMS or not _known(leaf) for leaf in leaves):
            raise _invalid(f"the reference's outputs must be dense tensors on {self.device} of known dtypes")
        if any(leaf.is_floating_point() and bool(torch.isnan(leaf).any()) for leaf in leaves):
            raise _invalid("the reference's output holds NaN, so nothing can agree with it")
        self.structure = self.structure or structure
        if structure != self.structure:
            raise _invalid("the reference must return the same structure each time")
        # An output may be an input, or a view of one: what is compared must be the judge's own.
        case.outputs = [leaf.detach().clone(memory_format=torch.contiguous_format) for leaf in leaves]
        changed = [arguments[place] for place in self.places]
        if not self.output_aliases:
            owners = {tensor.untyped_storage().data_ptr(): i for i, tensor in reversed(list(enumerate(changed)))}
            owners.pop(0, None)  # the address of all storages that hold nothing
            self.output_aliases = tuple(owners.get(leaf.untyped_storage().data_ptr()) for leaf in leaves)
        self.mutates_inputs |= any(not same_bits(a, b) for a, b in zip(changed, case.inputs, strict=True))
        return True

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
