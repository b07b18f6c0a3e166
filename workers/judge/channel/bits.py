"""Comparison of tensors' bits, and the range of their values. Work goes in pieces, without temporaries of full size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

#: Number of 64-bit words compared at a time. A GPU gets more, because each comparison waits for the device.
_CHUNK: Final = 1 << 22
_GPU_CHUNK: Final = 1 << 25
#: Number of values reduced at a time by :func:`extremes`.
_PIECE: Final = 1 << 26


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of one spec are bitwise equal, NaN included."""
    chunk = _GPU_CHUNK if a.is_cuda else _CHUNK
    pairs = zip(_words(a, chunk), _words(b, chunk), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return whether two tensors of one spec differ bitwise, without waiting for the device."""
    pairs = zip(_words(a, _GPU_CHUNK), _words(b, _GPU_CHUNK), strict=True)
    return torch.stack([(x != y).any() for x, y in pairs]).any()


def count_changed(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return how many values of two tensors of one spec differ bitwise.

    A complex128 value counts twice where both its parts differ.
    """
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(a.itemsize, torch.int64)
    flat = (tensor.contiguous().reshape(-1).view(kind).split(_CHUNK) for tensor in (a, b))
    return sum(int((x != y).sum()) for x, y in zip(*flat, strict=True))


def checksum(tensor: torch.Tensor) -> int:
    """Return a checksum of a tensor's bits, to distinguish two draws. It does not resist deliberate collisions."""
    sums = torch.zeros((), dtype=torch.int64, device=tensor.device)
    odd = 2 * torch.arange(min(_CHUNK, max(8, tensor.nbytes // 8)), device=tensor.device) + 1
    for number, words in enumerate(_words(tensor, _CHUNK)):
        sums = sums * 31 + number + (words * odd[: words.numel()]).sum()  # overflow wraps around on every device
    return int(sums) % 2**64


def extremes(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and the largest value without waiting for the device. Both are NaN if any value is NaN.

    The tensor has floating or complex numbers. Real and imaginary parts count as separate values.
    """
    flat = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).reshape(-1)
    # torch has no aminmax for 8-bit floats.
    pieces = (piece.float() if piece.itemsize == 1 else piece for piece in flat.split(_PIECE))
    low, high = torch.stack([torch.stack(piece.aminmax()) for piece in pieces]).unbind(1)
    return low.amin(), high.amax()


def _words(tensor: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
    """Yield a tensor's bits in pieces of 64-bit words. The last piece is the remaining bytes."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    whole = flat.numel() // 8 * 8
    words = flat[:whole].view(torch.int64)
    for begin in range(0, words.numel(), chunk):
        yield words[begin : begin + chunk]
    yield flat[whole:]
