"""GPU memory of the judge in which a reference stores small inputs and answers.

The judge can read a process's GPU memory only after mapping each allocation. The driver serialises mapping between all
processes of a host, just as it serialises the creation of contexts. An arena is mapped once.
"""

from __future__ import annotations

from typing import Final

import torch

from workers.judge.channel.buffers import OpenedBuffer, is_dense
from workers.judge.channel.tensors import Location, Where

#: Alignment of tensors in bytes, the same as in torch's allocator.
_ALIGNMENT: Final = 512


def taken_by(nbytes: int) -> int:
    """Return the number of bytes that a tensor of ``nbytes`` takes in an arena."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Arena:
    """Allocates tensors in an arena, in the process that fills it."""

    def __init__(self, buffer: OpenedBuffer) -> None:
        """Take ownership of an empty buffer of bytes."""
        self._buffer = buffer
        self._flat = buffer.tensor
        #: Begin and end of each free range, in order.
        self._free = [(0, self._flat.numel())]
        #: Sizes of the used ranges by their begin.
        self._taken: dict[int, int] = {}

    def keep(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Copy a tensor into the arena in the same layout. Return None if it is not dense or does not fit."""
        if not tensor.numel() or not is_dense(tensor.shape, tensor.stride()):
            return None
        size = taken_by(tensor.nbytes)
        for number, (begin, end) in enumerate(self._free):
            if end - begin >= size:
                self._free[number : number + 1] = [(begin + size, end)] if end - begin > size else []
                self._taken[begin] = size
                flat = self._flat[begin : begin + tensor.nbytes].view(tensor.dtype)
                return flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset()).copy_(tensor)
        return None

    def location(self, tensor: torch.Tensor) -> Location | None:
        """Return the location of a tensor in the arena, or None if it is not in the arena."""
        offset = tensor.data_ptr() - self._flat.data_ptr()
        if not tensor.numel() or not 0 <= offset < self._flat.numel():
            return None
        return Location(Where.ARENA, offset=offset, stride=tensor.stride())

    def let_go(self, tensor: torch.Tensor) -> None:
        """Free the memory of a tensor that :meth:`keep` returned. Ignore any other tensor."""
        begin = tensor.data_ptr() - self._flat.data_ptr()
        if (size := self._taken.pop(begin, 0)) == 0:
            return
        joined: list[tuple[int, int]] = []
        for low, high in sorted([*self._free, (begin, begin + size)]):
            if joined and joined[-1][1] == low:
                low = joined.pop()[0]
            joined.append((low, high))
        self._free = joined

    def close(self) -> None:
        """Unmap the arena. No tensor in it must be used afterwards, and no GPU work on it must be pending."""
        self._buffer.close()
