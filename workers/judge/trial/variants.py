"""Hidden inputs, from other distributions than the problem's own.

A kernel may rely on properties of the problem's inputs: positive values, values within [0, 1], rows that sum to one, a
symmetric matrix. Variants therefore stay within the range of the given inputs, and leave structured inputs unchanged.
The reference decides the rest of a problem's domain: :meth:`workers.judge.trial.reference.Reference.answer`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

#: Largest total size of inputs for which variants are made. Each costs a call of the reference and of the kernel.
MAX_BYTES: Final = {"cuda": 256 << 20, "cpu": 8 << 20}
_SCALE: Final = 100.0
#: Factor for values that never leave [-1, 1]: their meaning may forbid larger ones.
_SHRINK: Final = 1 / 128
_INTEGER: Final = 3
#: Share of the values to replace by special ones.
_SPECIAL: Final = 1 / 64
#: Share of zeros above which a tensor counts as sparse, such as a mask or a triangle.
_SPARSE: Final = 0.1


@dataclass(frozen=True, slots=True)
class _Range:
    """The smallest and the largest value of one given tensor."""

    low: float
    high: float

    @property
    def bounded(self) -> bool:
        return self.low >= -1 and self.high <= 1


def variants(inputs: list[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    """Make variants of inputs, with the same shapes and dtypes. Draws from torch's default generators.

    Args:
        inputs: the inputs of one given case. Tensors that are structured or not floating stay the same.

    Returns:
        the inputs of each variant, by the name of its distribution.
    """
    ranges = [_range(tensor) for tensor in inputs]
    kinds: dict[str, list[torch.Tensor]] = {}
    for name, make in _MAKERS.items():
        made = [make(tensor, own) if own else None for tensor, own in zip(inputs, ranges, strict=True)]
        if any(tensor is not None for tensor in made):
            kinds[name] = [tensor if new is None else new for tensor, new in zip(inputs, made, strict=True)]
    return kinds


def _scaled(tensor: torch.Tensor, own: _Range) -> torch.Tensor | None:
    """Multiply by 100, or by 1/128 if values never leave [-1, 1]."""
    factor = _SHRINK if own.bounded else _SCALE
    if own.bounded and own.low > own.high * _SHRINK:
        return None  # the values are bounded away from zero
    return tensor * factor if _fits(tensor, own, factor) else None


def _uniform(tensor: torch.Tensor, own: _Range) -> torch.Tensor | None:
    """Draw uniformly from the given range."""
    return (torch.rand_like(tensor) * (own.high - own.low) + own.low).clamp(own.low, own.high)


def _integers(tensor: torch.Tensor, own: _Range) -> torch.Tensor | None:
    """Draw small whole numbers: sums of their products are exact in any order."""
    low, high = math.ceil(max(own.low, -_INTEGER)), math.floor(min(own.high, _INTEGER))
    if low >= high:
        return None
    return torch.empty_like(tensor).random_(low, high + 1)


def _adversarial(tensor: torch.Tensor, own: _Range) -> torch.Tensor | None:
    """Replace a few values by extremes, outliers, zeros of both signs, and denormals."""
    specials = [own.low, own.high]
    if own.low <= 0 <= own.high:
        specials += [0.0, -0.0] if own.low < 0 else [0.0]
    if own.low < 0 < own.high:
        denormal = torch.finfo(tensor.dtype).tiny / 4
        specials += [denormal, -denormal]
    if not own.bounded and _fits(tensor, own, _SCALE):
        specials += [_SCALE * bound for bound in (own.low, own.high) if abs(bound) > 1]
    few = max(1, int(tensor.numel() * _SPECIAL))
    places = torch.randint(tensor.numel(), (few,), device=tensor.device)
    values = torch.tensor(specials, dtype=tensor.dtype, device=tensor.device)
    chosen = values[torch.randint(len(specials), (few,), device=tensor.device)]
    flat = tensor.reshape(-1).clone()
    flat[places] = chosen
    return torch.empty_like(tensor).copy_(flat.view(tensor.shape))


_MAKERS: Final[dict[str, Callable[[torch.Tensor, _Range], torch.Tensor | None]]] = {
    "scaled": _scaled,
    "uniform": _uniform,
    "integers": _integers,
    "adversarial": _adversarial,
}


def _fits(tensor: torch.Tensor, own: _Range, factor: float) -> bool:
    """True if the values times ``factor`` are far from overflow."""
    return factor * max(abs(own.low), abs(own.high)) < torch.finfo(tensor.dtype).max / 64


def _range(tensor: torch.Tensor) -> _Range | None:
    """Return the range of a floating tensor without visible structure, and None for any other tensor."""
    if not tensor.is_floating_point() or tensor.dtype.itemsize == 1 or tensor.numel() < 2 or _is_expanded(tensor):
        return None
    low, high = (float(bound) for bound in torch.stack(tensor.aminmax()).tolist())
    if not math.isfinite(low) or not math.isfinite(high) or low == high:
        return None
    return None if _is_structured(tensor) else _Range(low, high)


def _is_expanded(tensor: torch.Tensor) -> bool:
    """True if several elements share memory, as after ``expand``."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _is_structured(tensor: torch.Tensor) -> bool:
    """True if the values are whole, sparse, sorted, symmetric, or normalised along a dimension."""
    close = max(1e-5, torch.finfo(tensor.dtype).eps / 2)
    values = tensor.double()
    signs = [(values == values.round()).all(), (values == 0).double().mean() > _SPARSE]
    for dim, size in enumerate(values.shape):
        if size < 2:
            continue
        if size > 2:
            steps = values.diff(dim=dim)
            signs += [(steps >= 0).all(), (steps <= 0).all()]
        for measure in (values.sum(dim), values.square().sum(dim)):
            signs.append((measure - 1).abs().max() <= close)
            if measure.numel() > 1:
                signs.append(measure.max() - measure.min() <= close * measure.abs().max())
    if values.dim() >= 2 and values.shape[-1] == values.shape[-2] > 1:
        signs.append((values - values.mT).abs().max() <= close * values.abs().max())
    return bool(torch.stack(signs).any())
