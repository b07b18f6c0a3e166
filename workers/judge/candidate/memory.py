"""Memory that a call finds: marked where no call has written it, and never the answer of an earlier call."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Container, Iterable
from typing import Any, Final

import torch

from workers.judge.channel.bits import checksum
from workers.judge.channel.gpu_memory import call
from workers.judge.channel.marks import HOST_BYTE, NAN_BYTE, mark
from workers.judge.channel.orders import BufferSpec
from workers.judge.host import linux

#: Parameters of ``mallopt``, and the C library's own maximum of pieces that are mapped apart from the heap.
_TRIM_THRESHOLD: Final = -1
_MMAP_MAX: Final = -4
_PERTURB: Final = -6
_MOST_MAPPED: Final = 65536
#: Maximum number of free pieces of the host's memory that are marked for one output, and of bytes in them.
_MOST_BLOCKS: Final = 64
_MARKED_BYTES: Final = 256 << 20
#: Bytes by which a process can grow beyond what one call takes.
_GROWN_BYTES: Final = 128 << 20
#: Sizes of the pieces that the C library cuts off an aligned tensor's memory, and how many of each it caches.
_SMALL: Final = tuple(range(24, 136, 16))
_CACHED: Final = 7


def keep_host_memory(*, keeps: bool) -> None:
    """Make the C library keep all freed memory for later allocations, or return large pieces at once. It marks none."""
    _mallopt(_MMAP_MAX, 0 if keeps else _MOST_MAPPED)
    _mallopt(_TRIM_THRESHOLD, -1)
    _mallopt(_PERTURB, 0)


def _mallopt(parameter: int, value: int) -> None:
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(parameter, value)


class _HostMemory(ctypes.Structure):
    """``struct mallinfo2`` of the C library: the size of the heap in bytes, and how many of them are free."""

    _fields_ = (("heap", ctypes.c_size_t), ("others", ctypes.c_size_t * 7), ("free", ctypes.c_size_t * 2))


class FreeMemory:
    """The host memory that a process holds for its next call.

    New pages of Linux would hide missing writes, and cost a timed call time. So freed memory is kept, and given back
    only if the process has become larger than one call needs.
    """

    def __init__(self) -> None:
        #: Bytes of the process after a call that began without unused memory, and whether the last call began so.
        self._needed = 0
        self._is_trimmed = False

    def renew(self, forms: Iterable[BufferSpec], *, due: bool, marks: bool) -> None:
        """Keep the memory of the last call for the next one. Mark what tensors of these forms can take of it if due.

        The C library marks all memory that the next call allocates if ``marks`` is True, or if unused memory was given
        back, because new memory is zero.
        """
        keep_host_memory(keeps=True)
        held = linux.memory_bytes("self")
        if self._is_trimmed:
            self._needed = held
        most = self._needed + _GROWN_BYTES
        if due:
            _mark_free_memory(forms)
            held = linux.memory_bytes("self")
        self._is_trimmed = held > most
        if self._is_trimmed:
            linux.give_freed_memory_back()
        _fill_caches()
        _mallopt(_PERTURB, HOST_BYTE ^ 0xFF if marks or self._is_trimmed else 0)


def _fill_caches() -> None:
    """Fill the C library's caches of small pieces, so that it joins freed ones with a freed tensor next to them.

    A cached piece next to it makes a tensor's memory too short for another of the same size: a process whose outputs
    have 0.5 GiB grew by 0.5 GiB in each of its first five calls.
    """
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    pieces = [libc.malloc(size) for size in _SMALL for _ in range(_CACHED)]
    for piece in pieces:
        libc.free(ctypes.c_void_p(piece))


def _mark_free_memory(forms: Iterable[BufferSpec]) -> None:
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
            now = libc.mallinfo2()
            if now.heap != heap or now.free[0] < form.nbytes:
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


def mark_outputs(outputs: Iterable[torch.Tensor], parameters: Container[int], spared: dict[int, int]) -> None:
    """Mark outputs of a call that is over, except views of the parameters at these addresses.

    ``spared`` has their checksums by address. A parameter that calls change is memory for outputs, and is marked.
    """
    for output in outputs:
        address = output.untyped_storage().data_ptr()
        if address in parameters and spared.setdefault(address, total := checksum(output)) == total:
            continue
        with contextlib.suppress(RuntimeError):  # a layout that overlaps itself
            mark(output)
