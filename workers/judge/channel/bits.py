"""The bits of tensors, looked at in pieces: no mask or copy of a tensor's size is made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

#: Words to look at at a time.
_CHUNK: Final = 1 << 22


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of one spec hold the same bits, NaN included."""
    pairs = zip(_words(a), _words(b), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def count_changed(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return how many values of two tensors of one spec differ in their bits; some complex ones count twice."""
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(a.itemsize, torch.int64)
    flat = (tensor.contiguous().reshape(-1).view(kind).split(_CHUNK) for tensor in (a, b))
    return sum(int((x != y).sum()) for x, y in zip(*flat, strict=True))


def checksum(tensor: torch.Tensor) -> int:
    """Return a sum of a tensor's bits, for telling two draws apart. Whoever wants to can make two that agree."""
    total = 0
    for number, words in enumerate(_words(tensor)):
        places = 2 * torch.arange(words.numel(), device=words.device) + 1
        total = (total * 31 + number + int((words.to(torch.int64) * places).sum())) % 2**64
    return total


def _words(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Give a tensor's bits in pieces: numbers of 64 bits, and bytes at its end."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    whole = flat.numel() // 8 * 8
    words = flat[:whole].view(torch.int64)
    for begin in range(0, words.numel(), _CHUNK):
        yield words[begin : begin + _CHUNK]
    yield flat[whole:]
