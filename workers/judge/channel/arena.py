"""Memory of the judge's in which a reference keeps small inputs and answers.

What a process allocates on a GPU the judge can read only when it has mapped it, allocation by allocation. The driver
does so for all processes of a host one after the other, as it creates their contexts. An arena is mapped once.
"""

from __future__ import annotations

from typing import Final

import torch

from workers.judge.channel.buffers import OpenedBuffer, is_dense
from workers.judge.channel.protocol import Location, Where

#: Tensors begin at multiples of this many bytes, as torch's own do.
_ALIGNMENT: Final = 512


def taken_by(nbytes: int) -> int:
    """Return the bytes that a tensor of ``nbytes`` takes in an arena."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Arena:
    """An arena on the side that fills it."""

    def __init__(self, buffer: OpenedBuffer) -> None:
        """Take the arena's memory, as bytes, all of which is free; :meth:`close` gives it back."""
        self._buffer = buffer
        self._flat = buffer.tensor
        #: Beginning and end of what is free, in order; sizes of what is taken, by the beginning.
        self._free = [(0, self._flat.numel())]
        self._taken: dict[int, int] = {}

    def keep(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a copy of a tensor in the arena, in the same layout; None where it is not dense, or finds no room."""
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
        """Return where in the arena a tensor begins; None if it does not."""
        offset = tensor.data_ptr() - self._flat.data_ptr()
        if not tensor.numel() or not 0 <= offset < self._flat.numel():
            return None
        return Location(Where.ARENA, offset=offset, stride=tensor.stride())

    def let_go(self, tensor: torch.Tensor) -> None:
        """Let the memory of what :meth:`keep` has returned be taken again; any other tensor is passed over."""
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
        """Unmap it. Nothing may use what lies in it any more, nor work on it be under way."""
        self._buffer.close()
