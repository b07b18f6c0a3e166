"""Inputs of other distributions than a problem's own.

A kernel may rely on what the problem's inputs are like: positive, within [0, 1], rows that sum to one, a symmetric
matrix. So variants stay within what the given inputs let one assume, and inputs that are structured are kept as
they are. The reference tells what a variant cannot know of a problem's domain:
:meth:`workers.judge.trial.reference.Reference.answer`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

#: The largest inputs of which variants are made, in bytes, all together: each costs a reference's and a kernel's call.
MAX_BYTES: Final = {"cuda": 256 << 20, "cpu": 8 << 20}
_SCALE: Final = 100.0
#: For values that never leave [-1, 1], which may be so by their meaning.
_SHRINK: Final = 1 / 128
_INTEGER: Final = 3
#: The share of values that are replaced by special ones.
_SPECIAL: Final = 1 / 64
#: The share of zeros from which on a tensor counts as sparse: a mask, a triangle.
_SPARSE: Final = 0.1


@dataclass(frozen=True, slots=True)
class _Range:
    """What the given values of one tensor lie between, both bounds being values of it."""

    low: float
    high: float

    @property
    def bounded(self) -> bool:
        return self.low >= -1 and self.high <= 1


def variants(inputs: list[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    """Other inputs of the same specs, by the name of their distribution. Draws from torch's default generators.

    Args:
        inputs: of one given case. What is not floating, and what is structured, is the same in all variants.
    """
    ranges = [_range(tensor) for tensor in inputs]
    kinds: dict[str, list[torch.Tensor]] = {}
    for name, make in _MAKERS.items():
        made = [make(tensor, own) if own else None for tensor, own in zip(inputs, ranges, strict=True)]
        if any(tensor is not None for tensor in made):
            kinds[name] = [tensor if new is None else new for tensor, new in zip(inputs, made, strict=True)]
    return kinds


def _scaled(tensor: torch.Tensor, own: _Range) -> torch.Tensor | None:
    """A hundred times as large; a 128th where values never leave [-1, 1]."""
    factor = _SHRINK if own.bounded else _SCALE
    if own.bounded and own.low > own.high * _SHRINK:
        return None  # values that keep away from zero
    return tensor * factor if _fits(tensor, own, factor) else None


def _uniform(tensor: torch.Tensor, own: _Range) -> torch.Tensor | None:
    """Spread evenly over the range that was seen."""
    return (torch.rand_like(tensor) * (own.high - own.low) + own.low).clamp(own.low, own.high)


def _integers(tensor: torch.Tensor, own: _Range) -> torch.Tensor | None:
    """Small whole numbers: sums of their products are exact in every order."""
    low, high = math.ceil(max(own.low, -_INTEGER)), math.floor(min(own.high, _INTEGER))
    if low >= high:
        return None
    return torch.empty_like(tensor).random_(low, high + 1)


def _adversarial(tensor: torch.Tensor, own: _Range) -> torch.Tensor | None:
    """A few special values among the given ones: extremes, outliers, zeros of both signs, denormals."""
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
    """Whether values times ``factor`` are far from overflowing."""
    return factor * max(abs(own.low), abs(own.high)) < torch.finfo(tensor.dtype).max / 64


def _range(tensor: torch.Tensor) -> _Range | None:
    """The range of a floating tensor without visible structure; None for any other."""
    if not tensor.is_floating_point() or tensor.dtype.itemsize == 1 or tensor.numel() < 2 or _is_expanded(tensor):
        return None
    low, high = (float(bound) for bound in torch.stack(tensor.aminmax()).tolist())
    if not math.isfinite(low) or not math.isfinite(high) or low == high:
        return None
    return None if _is_structured(tensor) else _Range(low, high)


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether one value in memory stands at several places."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _is_structured(tensor: torch.Tensor) -> bool:
    """Whether values are whole, sparse, sorted, symmetric, or normalised along a dimension."""
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
