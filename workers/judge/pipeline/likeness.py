"""A simple relation of a wrong output to the reference's, such as a shift, a transpose or a lost factor."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from typing import Final

import torch

from workers.judge.channel.marks import HOST_BYTE
from workers.judge.pipeline.cases import comparable

Where = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
#: Larger outputs are not searched, to bound memory.
_MOST: Final = 1 << 20
#: Minimum number of values that share a factor or a term.
_FEW: Final = 8
#: Maximum share of the error, and of a shifted reference, that remains after a change which explains it.
_LEFT: Final = 0.1
_HELD: Final = float(torch.tensor([HOST_BYTE] * 4, dtype=torch.uint8).view(torch.float32))  # by new memory on a CPU


def words(out: torch.Tensor, ref: torch.Tensor, shape: tuple[int, ...], where: Where) -> str | None:
    """Return how a wrong output is related to the reference's, or None without a simple relation.

    Args:
        out, ref, shape: both outputs, flat, and their shape.
        where: function of both outputs that returns where values are wrong.
    """
    if not 2 <= ref.numel() <= _MOST:
        return None
    try:
        given, right = (comparable(each).double().reshape(shape) for each in (out, ref))
        return " ".join(_sentences(given, right, where(out, ref))) or None
    except RuntimeError:  # Other processes used the memory. The verdict does not need the words.
        return None


def _sentences(out: torch.Tensor, ref: torch.Tensor, wrong: torch.Tensor) -> Iterator[str]:
    places = wrong.reshape(ref.shape).nonzero()
    if not len(places):  # On a GPU another kernel counted them, with another rounding.
        return
    begin, end = places.amin(0).tolist(), (places.amax(0) + 1).tolist()
    if 2 * math.prod(map(operator.sub, end, begin)) <= ref.numel():
        yield f"All wrong values are in [{', '.join(f'{a}:{b}' for a, b in zip(begin, end, strict=True))}]."
    found, expected = out.reshape(-1)[wrong], ref.reshape(-1)[wrong]
    if not bool((found.isfinite() & expected.isfinite()).all()):
        return
    if not bool(found.any()):
        yield "Every wrong value is 0."
    elif 2 * len(found) > ref.numel() and bool((out.isfinite() & ref.isfinite()).all()):
        left = _LEFT * (out - ref).norm()
        explains = (
            told
            for told, like, of in _changes(out, ref)
            if 2 * like.numel() > ref.numel()
            and (like - of).norm() <= (left if like.numel() == ref.numel() else min(left, _LEFT * of.norm()))
        )
        if (change := next(explains, None)) is not None:
            yield f"The output is nearly the reference's {change}."
        elif bool((found < expected).all() | (found > expected).all()):
            yield f"Every wrong value is too {'small' if found[0] < expected[0] else 'large'}."


def _changes(out: torch.Tensor, ref: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield changes in words, with the tensors that are equal if a change is the only one."""
    factor = float((out * ref).sum() / ref.square().sum())
    yield f"times {factor:.4g}", out, ref * factor
    offset = float((out - ref).mean())
    held = ", which new memory holds here: set it first" if abs(offset - _HELD) < 1e-4 else ""
    yield f"plus {offset:.4g}{held}", out - offset, ref
    if ref.ndim > 1:
        yield "with its last two dimensions exchanged", out.reshape(ref.mT.shape).mT, ref
    for dimension, length in enumerate(ref.shape):
        for by in (1, -1):
            given, right = (max(by, 0), max(-by, 0))
            ends = out.narrow(dimension, given, length - 1), ref.narrow(dimension, right, length - 1)
            yield f"shifted by {by} along dimension {dimension}", *ends
        others = [each for each in range(ref.ndim) if each != dimension]
        if _FEW * length <= ref.numel():
            factors = (out * ref).sum(others, True) / ref.square().sum(others, True)
            yield f"times factors that depend on dimension {dimension} alone", out, ref * factors
            yield f"plus terms that depend on dimension {dimension} alone", out - (out - ref).mean(others, True), ref
