"""Memory that a call finds: marked where no call has written it, and never the answer of an earlier call."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Container, Generator, Iterable
from typing import Any, Final

import torch

from workers.judge.channel.gpu_memory import call
from workers.judge.channel.marks import HOST_BYTE, NAN_BYTE, mark
from workers.judge.channel.orders import BufferSpec

#: Parameters of ``mallopt``.
_TRIM_THRESHOLD: Final = -1
_MMAP_MAX: Final = -4
_PERTURB: Final = -6
#: Maximum number of free pieces of the host's memory that are marked for one output, and of bytes in them.
_MOST_BLOCKS: Final = 64
_MARKED_BYTES: Final = 256 << 20


def keep_host_memory() -> None:
    """Make the C library keep freed memory for later allocations. New pages of Linux would hide missing writes."""
    _mallopt(_MMAP_MAX, 0)
    _mallopt(_TRIM_THRESHOLD, -1)


@contextlib.contextmanager
def marked_host_memory() -> Generator[None]:
    """Mark all memory that the C library allocates inside the ``with`` block."""
    _mallopt(_PERTURB, HOST_BYTE ^ 0xFF)
    try:
        yield
    finally:
        _mallopt(_PERTURB, 0)


def _mallopt(parameter: int, value: int) -> None:
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(parameter, value)


class _HostMemory(ctypes.Structure):
    """``struct mallinfo2`` of the C library. Its first field is the size of the heap in bytes."""

    _fields_ = (("heap", ctypes.c_size_t), ("others", ctypes.c_size_t * 9))


def mark_free_host_memory(forms: Iterable[BufferSpec]) -> None:
    """Mark the free memory from which the C library can take tensors of these forms without new pages of Linux."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return
    libc.mallinfo2.restype = _HostMemory
    for form in {form for form in forms if form.nbytes}:
        blocks: list[torch.Tensor] = []
        heap = libc.mallinfo2().heap
        for _ in range(min(_MOST_BLOCKS, 1 + _MARKED_BYTES // form.nbytes)):
            blocks.append(torch.empty(form.shape, dtype=form.dtype))
            mark(blocks[-1])
            if libc.mallinfo2().heap != heap:
                break


def mark_free_blocks() -> None:
    """Enqueue marking of the free blocks of torch's GPU memory, when the device is idle.

    The memory of a captured graph stays unchanged, because the allocator does not know which of it the graph uses.
    """
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()
    for segment in segments:
        if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                where, nbytes = ctypes.c_void_p(address), ctypes.c_size_t(block["size"])
                call("cudaMemsetAsync", where, NAN_BYTE, nbytes, stream)
            address += block["size"]


def mark_outputs(outputs: Iterable[torch.Tensor], parameters: Container[int]) -> None:
    """Mark outputs of a call that is over, except views of the parameters at these addresses."""
    for output in outputs:
        if output.untyped_storage().data_ptr() not in parameters:
            with contextlib.suppress(RuntimeError):  # a layout that overlaps itself
                mark(output)
