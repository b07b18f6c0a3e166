"""Cases: input sets with their answers, and the arithmetic on them that several stages share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
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
#: Words or values to look at at a time, to bound memory.
_CHUNK: Final = 1 << 24
#: KernelBench's tolerance by an evaluation's precision, absolute and relative alike.
CLOSE: Final = {Precision.FP32: 1e-4, Precision.FP16: 1e-2, Precision.BF16: 1e-2}


@dataclass(slots=True, eq=False)
class Case:
    """One input set, and the reference's answer to it.

    Attributes:
        seed: set before the reference's and the candidate's forward alike, so that randomness agrees.
        drawn: the seed that the inputs are drawn under.
        on_device: whether they are made on the device.
        kind: ``given``, from the problem's own ``get_inputs()``, or the name of a variant of such inputs.
        tolerance: the problem's own; None where it gives none.
        position: of the number that differs, or around which numbers do, in a variant that has such a place.
        slot: the number under which the reference holds the inputs; None while it does not.
        inputs: the tensors among the arguments, on the device: on a GPU in the reference's memory, which the judge may
            read; empty while the reference does not hold them.
        outputs: the reference's output tensors, likewise; empty until the case is answered.
        exact: the same from the reference in float64, where that could be had.
        noise: for each output, how far the reference lies from itself where rounding errors move the inputs, as a share
            of its size; empty until that is known. All cases of an evaluation have the same list.
    """

    seed: int
    drawn: int = 0
    on_device: bool = False
    kind: str = GIVEN
    tolerance: Tolerance | None = None
    position: int = 0
    slot: int | None = None
    inputs: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    outputs: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    exact: list[torch.Tensor] | None = None
    noise: list[float] = field(default_factory=list[float])

    @property
    def nbytes(self) -> int:
        """Bytes of inputs and outputs."""
        return sum(tensor.nbytes for tensor in (*self.inputs, *self.outputs))


def pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return a tensor's values in pieces, so that no mask or copy of all of them is made."""
    flat = tensor.reshape(-1)
    return flat.split(_CHUNK) if flat.numel() > _CHUNK else (flat,)


def distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the norm of the difference, infinite if infinities differ. Does not wait for the device."""
    wide = torch.complex128 if b.is_complex() else torch.float64
    parts: list[torch.Tensor] = []
    for x, y in zip(pieces(a), pieces(b), strict=True):
        x, y = x.to(wide), y.to(wide)
        parts.append(torch.linalg.vector_norm(torch.where(x == y, 0.0, x - y)).nan_to_num(math.inf))
    return _together(parts)


def size(tensor: torch.Tensor) -> torch.Tensor:
    """Return the norm of the finite values. Does not wait for the device."""
    parts: list[torch.Tensor] = []
    for piece in pieces(tensor):
        wide = piece.to(torch.complex128 if piece.is_complex() else torch.float64)
        parts.append(torch.linalg.vector_norm(torch.where(wide.isfinite(), wide, 0.0)))
    return _together(parts)


def _together(norms: list[torch.Tensor]) -> torch.Tensor:
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
