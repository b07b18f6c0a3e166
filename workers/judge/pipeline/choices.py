"""Indices: whether two integer outputs select the same values, which can occur at several positions.

An integer output counts as indices into an input, or into another output, only if that is certain: the problem's source
names an operation that selects by value, the reference's indices select the largest, the smallest or the values of one
rank in all slices of a sample, and chance does not explain that.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from workers.judge.pipeline import rounding
from workers.judge.pipeline.cases import Case, comparable

#: Operations that return positions of values, and those that can return any of equal ones. The rest return the first.
_SELECTS: Final = re.compile(r"\b(?:arg(?:max|min|sort)|topk|m?sort|kthvalue|(?:nan)?median|max|min)\b")
_ANY: Final = re.compile(r"\b(?:topk|kthvalue|(?:nan)?median|(?:arg|m)?sort\b(?!.*\bstable\s*=\s*True))\b", re.DOTALL)
#: Number of slices that show what indices select, and the bits of evidence that they must have.
_SLICES: Final = 256
_BITS: Final = 16.0
#: Number of slices with equal values that show whether the last position is selected, as by a length.
_TIES: Final = 8
#: Dtypes of integers that torch sorts on all devices.
_INTEGERS: Final = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
#: Number of values to process at a time, to bound memory.
_CHUNK: Final = 1 << 22


def selection(source: str) -> str:
    """Return which of equal values the operations select that a problem's source names: ``any``, ``first`` or none."""
    return ("any" if _ANY.search(source) else "first") if _SELECTS.search(source) else ""


def are_right(outputs: Sequence[torch.Tensor], number: int, case: Case, rtol: float) -> bool:
    """Return whether an integer output that differs from the reference's is right too.

    Args:
        outputs: the kernel's outputs.
        number: the number of the integer output among them.
        rtol: largest relative difference of values that were computed, such as a router's probabilities.
    """
    out, ref = outputs[number], case.outputs[number]
    if ref.dtype is torch.bool or ref.is_floating_point() or ref.is_complex():
        return False
    out, ref = out.long(), ref.long()
    if case.exact is not None and bool(((out == ref) | (out == case.exact[number].long())).all()):
        return all(_is_distinct(out, dim) or not _is_distinct(ref, dim) for dim in range(ref.dim()))
    if not case.selects:
        return False
    # Values that were computed can be equal by rounding.
    sources = [] if case.selects == "first" else [(tensor, tensor) for tensor in case.arguments]
    sources += [both for i, both in enumerate(zip(case.outputs, outputs, strict=True)) if i != number]
    return any(
        _select_alike(*arranged, rtol=rtol)
        for theirs, mine in sources
        if theirs.numel()
        for arranged in _arranged(theirs, mine, ref, out)
        # One position in integers can be a length.
        if theirs.is_floating_point() or (theirs is mine and theirs.dtype in _INTEGERS and arranged[2].shape[-1] > 1)
    )


def are_tied(outputs: Sequence[torch.Tensor], number: int, case: Case) -> bool:
    """Return whether an integer output differs from the reference's only in indices of equal values.

    This explains a wrong output and excuses none: equal values can be chance.
    """
    out, ref = outputs[number], case.outputs[number]
    if ref.dtype is torch.bool or ref.is_floating_point() or ref.is_complex():
        return False
    floating = (tensor for tensor in case.arguments if tensor.is_floating_point() and tensor.numel())
    for source, _, indices, found in itertools.chain.from_iterable(
        _arranged(tensor, tensor, ref.long(), out.long()) for tensor in floating
    ):
        both = torch.stack((indices, found))
        if bool(((both >= 0) & (both < source.shape[-1])).all()):
            chosen, instead = (source.gather(-1, each) for each in both)
            if torch.equal(comparable(chosen), comparable(instead)):
                return True
    return False


def _is_distinct(indices: torch.Tensor, dim: int) -> bool:
    return not bool((indices.sort(dim).values.diff(dim=dim) == 0).any())


def _arranged(*tensors: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Yield two sources and two tensors of indices into them, with the indexed dimension last."""
    source, indices = tensors[0], tensors[2]
    if indices.numel() == 1 or (indices.dim() == 1 < source.dim() and source.numel() <= _CHUNK):
        yield [tensor.reshape(-1) for tensor in tensors]
    for dim in range(source.dim()):
        rest = (*source.shape[:dim], *source.shape[dim + 1 :])
        if rest == tuple(indices.shape):
            yield [tensor.movedim(dim, -1) for tensor in tensors[:2]] + [tensor[..., None] for tensor in tensors[2:]]
        if indices.dim() == source.dim() and rest == (*indices.shape[:dim], *indices.shape[dim + 1 :]):
            yield [tensor.movedim(dim, -1) for tensor in tensors]


def _select_alike(theirs: torch.Tensor, mine: torch.Tensor, ref: torch.Tensor, out: torch.Tensor, rtol: float) -> bool:
    """Return whether the indices ``ref`` into ``theirs`` and ``out`` into ``mine`` select the same values."""
    length = theirs.shape[-1]
    if bool(((ref < 0) | (ref >= length) | (out < 0) | (out >= length)).any()):
        return False
    some = rounding.drawn(ref.numel() // ref.shape[-1], _SLICES).to(ref.device)
    if (order := _Order.of(_slices(theirs, some), _slices(ref, some))) is None:
        return False
    wrong = (ref != out).any(-1).reshape(-1).nonzero()[:, 0]
    for part in wrong.split(max(1, _CHUNK // length)):
        source, own, indices, found = (_slices(tensor, part) for tensor in (theirs, mine, ref, out))
        if not (order.holds(source, indices) and order.holds(own, found)):
            return False
        chosen, instead = (source.gather(1, each).sort().values for each in (indices, found))
        if bool(((chosen - instead).abs() > rtol * chosen.abs()).any()):
            return False
        if _is_distinct(indices, 1) and not _is_distinct(found, 1):
            return False
    return True


@dataclass(frozen=True, slots=True)
class _Order:
    """Ranks of the values that indices select in each slice, and whether the indices are in the order of the ranks."""

    ranks: torch.Tensor
    is_sorted: bool

    @classmethod
    def of(cls, source: torch.Tensor, indices: torch.Tensor) -> _Order | None:
        """Return what indices into slices select, or None if that is not certain."""
        values, chosen, count = source.sort().values, source.gather(1, indices), indices.shape[1]
        least = torch.searchsorted(values, chosen)
        equal = torch.searchsorted(values, chosen, right=True) - least
        if float((values.shape[1] / equal.clamp_min(1)).log2().sum()) < _BITS:
            return None
        if count == 1:
            tied = equal[:, 0] > 1
            last = torch.where(source == chosen, torch.arange(source.shape[1], device=source.device), -1).amax(1)
            if int(tied.sum()) >= _TIES and bool((last == indices[:, 0])[tied].all()):
                return None
        ranks = torch.arange(values.shape[1], device=source.device)
        possible = [ranks.flip(0)[:count], ranks[:count]]
        possible += [
            ranks[rank : rank + 1] for rank in ((values == chosen).all(0).nonzero()[:1, 0] if count == 1 else ())
        ]
        forms = (True, False) if count < len(ranks) else (True,)  # Any permutation selects all values.
        orders = (cls(some, is_sorted) for is_sorted in forms for some in possible)
        return next((order for order in orders if order.holds(source, indices)), None)

    def holds(self, source: torch.Tensor, indices: torch.Tensor) -> bool:
        """Return whether indices into slices select values of these ranks."""
        chosen, expected = source.gather(1, indices), source.sort().values[:, self.ranks]
        if not self.is_sorted:
            chosen, expected = chosen.sort().values, expected.sort().values
        return torch.equal(chosen, expected)


def _slices(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return slices along the last dimension, by number, in a dtype that can be sorted."""
    chosen = tensor[None] if tensor.dim() == 1 else tensor[torch.unravel_index(rows, tensor.shape[:-1])]
    return comparable(chosen) if chosen.is_floating_point() else chosen
