"""The bits of tensors, and the range of values, looked at in pieces: no mask or copy of a tensor's size is made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

#: Words to look at at a time: on a CPU, and on a GPU, where each look is waited for.
_CHUNK: Final = 1 << 22
_GPU_CHUNK: Final = 1 << 25
#: Values to look at at a time for their range.
_PIECE: Final = 1 << 26


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of one spec hold the same bits, NaN included."""
    chunk = _GPU_CHUNK if a.is_cuda else _CHUNK
    pairs = zip(_words(a, chunk), _words(b, chunk), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def count_changed(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return how many values of two tensors of one spec differ in their bits; some complex ones count twice."""
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(a.itemsize, torch.int64)
    flat = (tensor.contiguous().reshape(-1).view(kind).split(_CHUNK) for tensor in (a, b))
    return sum(int((x != y).sum()) for x, y in zip(*flat, strict=True))


def checksum(tensor: torch.Tensor) -> int:
    """Return a sum of a tensor's bits, for telling two draws apart. Whoever wants to can make two that agree."""
    sums = torch.zeros((), dtype=torch.int64, device=tensor.device)
    odd = 2 * torch.arange(min(_CHUNK, max(8, tensor.nbytes // 8)), device=tensor.device) + 1
    for number, words in enumerate(_words(tensor, _CHUNK)):
        sums = sums * 31 + number + (words * odd[: words.numel()]).sum()  # it overflows, in the same way everywhere
    return int(sums) % 2**64


def extremes(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and the largest value, NaN both where there is one, without waiting for the device.

    Args:
        tensor: of floating or complex numbers, one at least; the parts of complex ones count one by one.
    """
    flat = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).reshape(-1)
    # Values of one byte have no such operation.
    pieces = (piece.float() if piece.itemsize == 1 else piece for piece in flat.split(_PIECE))
    low, high = torch.stack([torch.stack(piece.aminmax()) for piece in pieces]).unbind(1)
    return low.amin(), high.amax()


def _words(tensor: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
    """Give a tensor's bits in pieces: numbers of 64 bits, and bytes at its end."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    whole = flat.numel() // 8 * 8
    words = flat[:whole].view(torch.int64)
    for begin in range(0, words.numel(), chunk):
        yield words[begin : begin + chunk]
    yield flat[whole:]
