"""Cases: input sets with their answers, and the arithmetic on them that several stages share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

from kqueue.contract import Precision, Tolerance

DTYPES: Final = {
    Precision.FP32: torch.float32,
    Precision.FP16: torch.float16,
    Precision.BF16: torch.bfloat16,
}
#: The kind of cases that come from the problem's own ``get_inputs()``.
GIVEN: Final = "given"
#: KernelBench's tolerance by an evaluation's precision, absolute and relative alike.
CLOSE: Final = {Precision.FP32: 1e-4, Precision.FP16: 1e-2, Precision.BF16: 1e-2}


@dataclass(slots=True)
class Case:
    """One input set, and the reference's answer to it.

    Attributes:
        seed: set before the reference's and the candidate's forward alike, so that randomness agrees.
        inputs: the tensors among the arguments, on the device, in the judge's own memory.
        outputs: the reference's output tensors; empty until the case is answered.
        exact: the same from the reference in float64, where that could be had.
        kind: ``given``, from the problem's own ``get_inputs()``, or the name of a variant of such inputs.
        drawn: the seed that the inputs were drawn under; 0 for variants.
        tolerance: the problem's own; None where it gives none.
    """

    seed: int
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    exact: list[torch.Tensor] | None = None
    kind: str = GIVEN
    drawn: int = 0
    tolerance: Tolerance | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of inputs and outputs."""
        return sum(tensor.nbytes for tensor in (*self.inputs, *self.outputs))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of one spec hold the same bits, NaN included."""
    return bool(torch.equal(_bits(a), _bits(b)))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.contiguous()
    return dense.view(torch.uint8) if dense.dim() else dense.reshape(1).view(torch.uint8)


def widened(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the float64 reference's counterpart: float64, complex128, or the dtype itself."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def moved(tensor: torch.Tensor, rounding: float) -> torch.Tensor:
    """Return floating values in float64, each changed by about ``rounding``, within the range that they have."""
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor
    wide = tensor.double()
    low, high = wide.aminmax()
    typical = wide.square().mean().sqrt()
    return (wide + rounding * (wide * torch.randn_like(wide) + typical * torch.randn_like(wide))).clamp(low, high)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the norm of the difference, infinite if infinities differ."""
    wide = torch.complex128 if b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    return float(torch.linalg.vector_norm(torch.where(a == b, 0.0, a - b)).nan_to_num(math.inf))


def size(tensor: torch.Tensor) -> float:
    """Return the norm of the finite values."""
    wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    return float(torch.linalg.vector_norm(torch.where(wide.isfinite(), wide, 0.0)))


def is_tame(tensor: torch.Tensor) -> bool:
    """Return whether all values are far from overflowing."""
    most = torch.finfo(tensor.dtype).max / 64
    return not tensor.numel() or bool((tensor.abs() < most).all())
