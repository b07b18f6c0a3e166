"""Cases, which are input sets with the reference's answers, and arithmetic on them that several stages share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from kqueue.contract import Precision, Tolerances
from kqueue.profiles import RULES, Protocol
from workers.judge.channel.bits import checksum
from workers.judge.channel.layout import put_back
from workers.judge.channel.orders import Gradients
from workers.judge.channel.tensors import PACKED, TensorSpec, View, output_name

DTYPES: Final = {
    Precision.FP32: torch.float32,
    Precision.FP16: torch.float16,
    Precision.BF16: torch.bfloat16,
}
#: Kind of the cases from the problem's own ``get_inputs()``.
GIVEN: Final = "given"
#: Number of values to process at a time, to bound memory.
_CHUNK: Final = 1 << 24
#: Positive numbers of float4_e2m1 by their code, and the code of NaN in float8_e8m0.
_E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NAN_SCALE: Final = 255
#: Signed dtypes of the size of the unsigned ones.
_SIGNED: Final = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
#: KernelBench's tolerance by an evaluation's precision, used as absolute and as relative tolerance.
CLOSE: Final = {
    precision: RULES[Protocol.KERNELBENCH].bound(str(dtype).removeprefix("torch."))[0]
    for precision, dtype in DTYPES.items()
}


@dataclass(slots=True)
class Form:
    """The form of a problem's calls, as made by its reference.

    Attributes:
        arguments: arrangement of ``forward``'s arguments, or None before the first case.
        views: the tensors among the arguments, as views of the input tensors of a case.
        structure: arrangement of the outputs, empty before the first answer.
        output_specs: shape, dtype and device of each output. The inputs that the reference changes follow as further
            outputs, whose aliases are their numbers, and then buffers and parameters that it changes.
        output_strides: strides of each output.
        output_aliases: for each output, the number of the input whose memory it shares, or None.
        memories: for each output, a number that other outputs in the same memory have too.
        lasting: numbers of the outputs in memory of the reference's model.
        buffers: names of these buffers and parameters.
        initial: checksums of the values to which they are reset before each call.
        resets: names of all that are reset.
        unwatched: names of those that the reference changes and that are too large for it.
        unkept: numbers of those that the kernel does not have in this form, or leaves unchanged.
        draws: True if the reference has drawn random numbers, so that the seed of a call decides its answer.
        differentiates: True if the reference uses autograd in its forward.
        paths: path of each output that forward returns. Names of gradients follow.
        gradients: the gradients of each call, or None for none.
    """

    arguments: Any = None
    views: tuple[View, ...] = ()
    structure: str = ""
    output_specs: tuple[TensorSpec, ...] = ()
    output_strides: tuple[tuple[int, ...], ...] = ()
    output_aliases: tuple[int | None, ...] = ()
    memories: tuple[int, ...] = ()
    lasting: tuple[int, ...] = ()
    buffers: tuple[str, ...] = ()
    initial: tuple[int, ...] = ()
    resets: tuple[str, ...] = ()
    unwatched: tuple[str, ...] = ()
    unkept: set[int] = field(default_factory=set[int])
    draws: bool = False
    differentiates: bool = False
    paths: tuple[str, ...] = ()
    gradients: Gradients | None = None

    @property
    def returned(self) -> int:
        """Number of outputs that forward returns, with the gradients."""
        return len(self.paths)

    @property
    def mutated(self) -> list[int]:
        """Numbers of the inputs that the reference changes."""
        return [number for number in self.output_aliases[self.returned :] if number is not None]

    @property
    def gradient_names(self) -> tuple[str, ...]:
        """Names of the gradients, which are the last of the returned outputs."""
        wanted = self.gradients
        return () if wanted is None else tuple(wanted.names[number] for number in wanted.delivered)

    @property
    def effects(self) -> int:
        """Number of the first output that is a buffer."""
        return len(self.output_specs) - len(self.buffers)

    def name(self, number: int) -> str:
        """Return an output's name in messages."""
        if self.is_returned(number):
            return output_name(number, self.paths)
        if number >= self.effects:
            return f"the model's {self.buffers[number - self.effects]} after the call"
        return f"input {self.argument(self.mutated[number - self.returned])} after the call"

    def is_returned(self, number: int) -> bool:
        """Return whether an output is returned by forward, and not an input or a buffer that it changes."""
        return not self.structure or number < self.returned

    def is_gradient(self, number: int) -> bool:
        """Return whether an output is a gradient."""
        return self.returned - len(self.gradient_names) <= number < self.returned

    def precision(self, given: Precision) -> Precision:
        """Return the evaluation's precision, or 16 bits if it is in fp32 and all floating outputs have these."""
        dtypes = {spec.dtype for spec in self.output_specs if spec.dtype is not None and spec.dtype.is_floating_point}
        found = (precision for precision, dtype in DTYPES.items() if dtypes == {dtype})
        return next(found, given) if given is Precision.FP32 else given

    def effect(self, number: int) -> str | None:
        """Return the name of an output that is not in the model's own return value, or None."""
        return None if self.is_returned(number) and not self.is_gradient(number) else self.name(number)

    def input_name(self, number: int) -> str:
        """Return an input tensor's name in messages. Upstream gradients follow the arguments."""
        argument, upstream = self.argument(number), () if self.gradients is None else self.gradients.outputs
        beyond = argument - len(self.views) + len(upstream)
        return f"input tensor {argument}" if beyond < 0 else f"upstream gradient of output {upstream[beyond]}"

    def argument(self, number: int) -> int:
        """Return the number of the first argument that is a view of an input tensor."""
        return next((n for n, view in enumerate(self.views) if view.root == number), number)

    def is_unkept(self, number: int, output: torch.Tensor) -> bool:
        """Return whether a wrong output is a buffer that the kernel left unchanged, and record it."""
        if number < self.effects or not self.buffers:
            return False
        if checksum(output) == self.initial[number - self.effects]:
            self.unkept.add(number)
        return number in self.unkept


@dataclass(slots=True, eq=False)
class Case:
    """One input set, and the reference's answer to it.

    Attributes:
        seed: seed of the reference's and the candidate's forward, so that random numbers agree.
        drawn: seed of the inputs.
        on_device: whether the inputs are made on the device.
        kind: ``given``, from the problem's own ``get_inputs()``, or the name of a variant of such inputs.
        tolerance: the problem's own tolerance, or None.
        position: position of the number that differs, or around which numbers differ, in variants with a position.
        slot: number under which the reference holds the inputs, or None.
        inputs: tensors among the arguments, on a GPU in the reference's memory, which the judge can read. Empty while
            the reference does not hold them.
        outputs: the reference's output tensors, in the same memory. Empty until the case is answered.
        exact: outputs of the reference in float64, if available.
        unproven: such outputs, until it is known whether the float64 model is the same model.
        noise: relative distance, for each output that is no buffer, between two reference outputs whose inputs differ
            by rounding errors. Empty until it is measured. All cases of an evaluation share this list.
        again: function that returns the reference's outputs to inputs changed by about a rounding error, or None.
        moved: function that yields such outputs to inputs changed by several rounding errors. Without any, the
            comparison does not look for jumps.
        views: the arguments as views of ``inputs``. Empty if the arguments are the inputs themselves.
        selects: which of equal values integers can select that are indices (:func:`.choices.selection`).
        form: form of the problem's calls, which all cases of an evaluation share.
        check: function that returns what the problem's check() says against outputs for a case, or an empty text. None
            if the comparison decides.
        restore: function that returns the whole outputs and case, if this case has only pieces of the outputs.
    """

    seed: int
    drawn: int = 0
    on_device: bool = False
    kind: str = GIVEN
    tolerance: Tolerances | None = None
    position: int = 0
    slot: int | None = None
    inputs: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    outputs: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    exact: list[torch.Tensor] | None = None
    unproven: list[torch.Tensor] | None = None
    noise: list[float] = field(default_factory=list[float])
    again: Callable[[], list[torch.Tensor] | None] | None = None
    moved: Callable[[], Iterable[list[torch.Tensor]]] = tuple
    views: tuple[View, ...] = ()
    selects: str = ""
    form: Form = field(default_factory=Form)
    check: Callable[[Case, Sequence[torch.Tensor]], str] | None = None
    restore: Callable[[list[torch.Tensor]], tuple[list[torch.Tensor], Case]] | None = None

    @property
    def arguments(self) -> list[torch.Tensor]:
        """The tensors among the arguments, in the layouts that the model gets."""
        return put_back(self.inputs, self.views) if self.inputs and self.views else self.inputs

    @property
    def nbytes(self) -> int:
        """Size of inputs and outputs in bytes."""
        return sum(tensor.nbytes for tensor in (*self.inputs, *self.outputs))


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values. Of :data:`.PACKED` formats, return both numbers of a pair, or a scale's exponent.

    These are in fp32. An exponent has the same rounding step everywhere. A scale's step is as large as the scale.
    """
    if tensor.dtype not in PACKED:
        return tensor
    codes = tensor.contiguous().view(torch.uint8)
    if tensor.dtype is torch.float8_e8m0fnu:
        return torch.where(codes == _NAN_SCALE, math.nan, codes.float() - _NAN_SCALE // 2)
    signed = torch.tensor([*_E2M1, *(-number for number in _E2M1)], device=tensor.device)
    # The first number of a pair is in the lower bits.
    return signed[torch.stack((codes & 15, codes >> 4), -1).int()].reshape(*tensor.shape[:-1], -1)


def values_at(tensor: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the values at flat positions, also of a dtype that torch cannot index."""
    flat = tensor.reshape(-1)
    return flat.view(torch.uint8)[positions].view(flat.dtype) if flat.dtype in PACKED else flat[positions]


def differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return where integers or Booleans differ, also of unsigned dtypes, for which torch has few operations."""
    signed = _SIGNED.get(a.dtype, a.dtype)
    return a.view(signed) != b.view(signed)


def pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Split a tensor's values into pieces, to avoid masks and copies of all values."""
    flat = tensor.reshape(-1)
    return flat.split(_CHUNK) if flat.numel() > _CHUNK else (flat,)


def distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the norm of the difference, infinite if infinities differ, without waiting for the device."""
    wide = torch.complex128 if b.is_complex() else torch.float64
    parts: list[torch.Tensor] = []
    for x, y in zip(pieces(a), pieces(b), strict=True):
        x, y = x.to(wide), y.to(wide)
        parts.append(torch.linalg.vector_norm(torch.where(x == y, 0.0, x - y)).nan_to_num(math.inf))
    return _together(parts)


def size(tensor: torch.Tensor) -> torch.Tensor:
    """Return the norm of the finite values, without waiting for the device."""
    parts: list[torch.Tensor] = []
    for piece in pieces(tensor):
        wide = piece.to(torch.complex128 if piece.is_complex() else torch.float64)
        parts.append(torch.linalg.vector_norm(torch.where(wide.isfinite(), wide, 0.0)))
    return _together(parts)


def _together(norms: list[torch.Tensor]) -> torch.Tensor:
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    """Convert to a dtype for exact enough differences: fp32 for floats up to 32 bits, else float64."""
    small = tensor.is_floating_point() and tensor.dtype is not torch.float64
    return tensor.to(torch.float32 if small else torch.float64)
