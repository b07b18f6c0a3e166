"""Values that mark memory which no call has written, so that the judge recognizes outputs that a kernel left out.

Floating values are marked by NaN, and integers by an unusual number. A first call on a CPU runs with new memory of the
host marked by the C library, which can repeat any byte but 0xFF. There even floats are marked by a number.
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch

from workers.judge.channel.gpu_memory import call

#: Byte that fills floating values, integers, and new memory of the host. The C library fills freed memory with the
#: complement of the last. Repeated, both are numbers of ordinary size in each floating dtype.
NAN_BYTE: Final = 0xFF
_INTEGER_BYTE: Final = 0xA5
HOST_BYTE: Final = 0xBF
#: Bytes that fill floating values of 16 bits and more on a CPU, where computed NaN can have ones alone.
_HOST_NAN: Final = b"\xfe\xff"
#: Formats of 8 bits in which :data:`NAN_BYTE` is NaN.
_NAN_MARKED: Final = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
_WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def mark(tensor: torch.Tensor) -> None:
    """Overwrite all values of a tensor, of any strides, with the mark of its dtype."""
    if tensor.is_cuda and tensor.is_contiguous():  # A launch through torch would take ten times as long.
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        where, size = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
        call("cudaMemsetAsync", where, _bytes_of(tensor)[0], size, stream)
        return
    size = min(tensor.itemsize, 8)
    parts = tensor.itemsize // size
    # An expanded dimension is written once, because torch refuses to write one address repeatedly.
    shape = [1 if step == 0 else length for length, step in zip(tensor.shape, tensor.stride(), strict=True)]
    words = torch.empty(0, dtype=_WORDS[size], device=tensor.device)
    steps = [step * parts for step in tensor.stride()]
    words.set_(tensor.untyped_storage(), tensor.storage_offset() * parts, [*shape, parts], [*steps, 1])
    words.fill_(_repeated(_bytes_of(tensor), size))


def unwritten(out: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """Return the positions of marked values in a flat output that differ from the reference's."""
    bits = out.contiguous().view(_WORDS[out.itemsize])
    marked = torch.zeros_like(bits, dtype=torch.bool)
    if out.itemsize > 1 or out.dtype in _NAN_MARKED:  # Another number of one byte can have any value.
        # Of many numbers on a GPU, or of 16 bits, one has the host's mark by chance.
        for part in (_bytes_of(out), bytes([HOST_BYTE]))[: 1 if out.is_cuda or out.itemsize < 4 else 2]:
            marked |= bits == _repeated(part, out.itemsize)
    return (marked & (bits != ref.contiguous().view(bits.dtype))).nonzero().flatten()


def _bytes_of(tensor: torch.Tensor) -> bytes:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return bytes([_INTEGER_BYTE])
    return bytes([NAN_BYTE]) if tensor.is_cuda or tensor.itemsize == 1 else _HOST_NAN


def _repeated(part: bytes, size: int) -> int:
    return int.from_bytes(part * (size // len(part)), "little", signed=True)
