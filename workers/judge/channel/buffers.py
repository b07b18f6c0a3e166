"""Buffers that the judge shares with a sealed process. Each is a separate allocation with a file descriptor.

On a CPU a buffer is a memfd. On a GPU it is an allocation of CUDA's virtual memory management
(:mod:`workers.judge.channel.gpu_memory`). A descriptor opens one allocation and nothing else.

The judge shares the inputs. Outputs stay in the process's memory, and the judge copies them. If candidates wrote into
the judge's memory, one could skip a copy that is part of an honest candidate's time. On a GPU the process exports the
allocations of its outputs (:class:`Exports`) and the judge maps them (:class:`Imports`). Mapped memory stays readable
after the process frees it, fails or dies. On a CPU the judge reads the process's memory (:class:`ProcessMemory`).
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import os
import random
from collections.abc import Sequence
from typing import Final

import torch

from workers.judge.channel import gpu_memory
from workers.judge.channel.flags import memory
from workers.judge.channel.gpu_memory import CudaCallError, Mapping
from workers.judge.channel.orders import BufferSpec
from workers.judge.channel.protocol import MAX_EXPORTED, Export, ProtocolError
from workers.judge.channel.tensors import Location, TensorSpec, Where

#: Number of announced runs after which a process starts over. One call has 32 at most.
_MANY_RUNS: Final = 16
#: Maximum number of runs that the judge accepts.
_MOST_RUNS: Final = 512
#: Number of pieces in which a tensor is read from a process's memory.
_PIECES: Final = 64
#: Minimum size of a piece in bytes.
_LEAST_PIECE: Final = 16 << 10
#: Byte beyond the end of a shared tensor. Floating numbers of it are NaN, so a kernel that reads them is wrong.
_BEYOND: Final = 0xFF


class _DeviceMemory:
    """Raw device memory with the interface from which torch makes a tensor."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


class SharedTensor:
    """A tensor in a shared buffer, on the side that allocated it. ``flat`` is the buffer as bytes.

    The other side opens the buffer with ``spec`` and ``descriptor``, which is None once it is closed.
    """

    def __init__(self, like: torch.Tensor) -> None:
        """Allocate room for a tensor of ``like``'s dtype, shape, strides and device type.

        The strides of a dense tensor are kept. Any other layout becomes contiguous.
        """
        model = torch.empty_like(like, device="meta", memory_format=torch.preserve_format)
        nbytes = max(model.numel() * model.element_size(), 1)
        self._mapping: Mapping | None = None
        self.descriptor: int | None
        if like.is_cuda:
            self._mapping, self.descriptor = gpu_memory.allocate(nbytes)
            whole = _view_of(self._mapping, self._mapping.nbytes)
        else:
            size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
            self.descriptor = memory("kqueue-buffer", size)
            whole = _map(self.descriptor, size)
        whole[nbytes:].fill_(_BEYOND)
        flat = whole[:nbytes]
        self.spec = BufferSpec(nbytes, like.dtype, tuple(like.shape), model.stride(), like.device.type)
        self.flat = flat
        self.tensor = _view(flat, self.spec)

    def close(self) -> None:
        """Close the memory's descriptor, once the other side has received it."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def free(self) -> None:
        """Free the memory. The tensor must not be used afterwards, and no GPU work on it must be pending."""
        self.close()
        if self._mapping is not None:
            self._mapping.close()


def form_of(tensor: torch.Tensor) -> BufferSpec:
    """Return a tensor's spec, for a side that uses its own memory."""
    return BufferSpec(tensor.nbytes, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device.type)


class OpenedBuffer:
    """A tensor in a buffer that the other side allocated."""

    def __init__(self, spec: BufferSpec, descriptor: int) -> None:
        """Map the buffer and close the descriptor."""
        self._mapping: Mapping | None = None
        if spec.device == "cpu":
            flat = _map(descriptor, spec.nbytes)
            os.close(descriptor)
        else:
            self._mapping = gpu_memory.open_descriptor(descriptor, spec.nbytes)
            flat = _view_of(self._mapping, spec.nbytes)
        self.tensor = _view(flat, spec)

    def close(self) -> None:
        """Unmap the buffer. The tensor must not be used afterwards, and no GPU work on it must be pending."""
        if self._mapping is not None:
            self._mapping.close()


#: Maximum number of allocations of a run that are all checked each time. Of a longer run only both ends are checked.
_LONG: Final = 4
#: Consecutive allocations, by address and serial number.
_Run = tuple[tuple[int, int], ...]


class Exports:
    """The GPU allocations that this process has announced to the judge.

    Torch's memory consists of many allocations, and each needs a query to the driver: 5 ms for 300 of them. Results are
    therefore cached until torch allocates device memory or frees some.
    """

    def __init__(self) -> None:
        self._runs: dict[_Run, int] = {}
        #: Records that must be sent before a reply that refers to them.
        self._pending: list[Export] = []
        #: Cached runs by ranges of addresses.
        self._cached: dict[tuple[int, int], _Run] = {}
        #: Bytes that torch had allocated and freed when the cache was filled.
        self._cached_at = (0, 0)
        #: Bytes that torch had allocated and freed when all runs were last checked.
        self._checked_at = (0, 0)

    def begin(self) -> None:
        """Prepare for the outputs of a call. Start over if there are many runs, or if memory of one was freed.

        The judge keeps announced memory mapped. When a run is numbered 0 again, the judge unmaps all earlier runs.
        """
        checked_at = self._checked_at
        if any(len(run) > _LONG for run in self._runs):
            self._checked_at = _allocated_and_freed()
        long = _LONG if checked_at == self._checked_at else math.inf
        if len(self._runs) >= _MANY_RUNS or not all(
            _is_alive(_ends(run) if len(run) > long else run) for run in self._runs
        ):
            self.forget()

    def forget(self) -> None:
        """Forget all runs, so that each is announced again when it is used."""
        self._runs.clear()
        self._cached.clear()

    def location(self, tensor: torch.Tensor) -> Location:
        """Return the location of a tensor on the GPU. New memory is announced by :meth:`pending`.

        Raise CudaCallError if the memory cannot be shared, for example because ``cudaMalloc`` allocated it.
        """
        begin = tensor.data_ptr()
        extent = 1 + sum(step * (size - 1) for step, size in zip(tensor.stride(), tensor.shape, strict=True))
        run = self._run_of(begin, begin + extent * tensor.element_size())
        number = self._runs.get(run)
        if number is None:
            number = self._runs[run] = self._announce(run)
        return Location(Where.EXPORTED, run=number, offset=begin - run[0][0], stride=tensor.stride())

    def _run_of(self, begin: int, end: int) -> _Run:
        """Return the allocations that contain a range of addresses."""
        cached = self._cached.get((begin, end))
        if cached is not None and _allocated_and_freed() == self._cached_at and _is_alive(_ends(cached)):
            return cached
        allocations: list[tuple[int, int]] = []
        at = begin
        while at < end:
            base, size = gpu_memory.range_of(at)
            allocations.append((base, gpu_memory.serial_of(base)))
            at = base + size
        run = tuple(allocations)
        if len(run) > _LONG:
            if (now := _allocated_and_freed()) != self._cached_at:
                self._cached, self._cached_at = {}, now
            self._cached[begin, end] = run
        return run

    def announce_memory(self) -> None:
        """Announce this process's whole host memory, which contains the outputs on a CPU."""
        descriptor = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        self._pending.append(Export(0, 1, (0,), (descriptor,)))

    def pending(self) -> list[Export]:
        """Return the records that must be sent before the next reply. The caller closes their descriptors."""
        pending, self._pending = self._pending, []
        return pending

    def _announce(self, run: _Run) -> int:
        number, records = len(self._runs), list[Export]()
        for first in range(0, len(run), MAX_EXPORTED):
            part = run[first : first + MAX_EXPORTED]
            sizes = tuple(gpu_memory.range_of(base)[1] for base, _ in part)
            descriptors: list[int] = []
            try:
                descriptors.extend(gpu_memory.export(base) for base, _ in part)
            except CudaCallError:
                for descriptor in (*descriptors, *(d for record in records for d in record.descriptors)):
                    os.close(descriptor)
                raise
            records.append(Export(number, len(run), sizes, tuple(descriptors)))
        self._pending += records
        return number


def _allocated_and_freed() -> tuple[int, int]:
    """Return the number of bytes of device memory that torch has allocated and freed so far."""
    reserved = torch.cuda.memory_stats_as_nested_dict()["reserved_bytes"]["all"]
    return reserved["allocated"], reserved["freed"]


def _ends(run: _Run) -> _Run:
    """Return the first and the last allocation. Checking these detects most changes of memory outside torch."""
    return run[:1] + run[-1:]


def _is_alive(run: _Run) -> bool:
    """Return whether all allocations still exist."""
    try:
        return all(gpu_memory.serial_of(base) == serial for base, serial in run)
    except CudaCallError:
        return False


class LocationError(ValueError):
    """Raised where a claimed location cannot contain the output."""


class Imports:
    """GPU memory of a sealed process from which the judge reads outputs."""

    def __init__(self) -> None:
        #: True while the judge's stream reads it. The process must not replace it then.
        self.in_use = False
        self._handles: dict[int, list[ctypes.c_uint64]] = {}
        self._sizes: dict[int, list[int]] = {}
        self._mapped: dict[int, tuple[Mapping, torch.Tensor]] = {}

    def __len__(self) -> int:
        """Return the number of announced runs."""
        return len(self._handles) + len(self._mapped)

    def add(self, export: Export) -> None:
        """Import a part of a run, and close its descriptors. Raise ProtocolError if the announcement is impossible."""
        if export.run == 0 and not 0 < len(self._handles.get(0, ())) < export.total:
            if self.in_use:
                raise ProtocolError("memory was replaced while calls were timed")
            self.close()
        gpu_memory.hold(self)
        handles = self._handles.setdefault(export.run, [])
        sizes = self._sizes.setdefault(export.run, [])
        try:
            if len(self) > _MOST_RUNS or len(handles) + len(export.descriptors) > export.total:
                raise ProtocolError("more memory was announced than is allowed")
            for descriptor, size in zip(export.descriptors, export.sizes, strict=True):
                handles.append(gpu_memory.import_handle(descriptor))
                sizes.append(size)
        except CudaCallError as error:
            raise ProtocolError(f"memory was announced that cannot be opened: {error}") from None
        finally:
            for descriptor in export.descriptors:
                os.close(descriptor)

    def view(self, location: Location, spec: TensorSpec) -> torch.Tensor:
        """Return the tensor at a location of the sealed process.

        Raise LocationError if the memory was not announced, or if the tensor would exceed it.
        """
        if location.run not in self._mapped:
            self._mapped[location.run] = self._map(location.run)
        return view_within(self._mapped[location.run][1], location, spec)

    def close(self) -> None:
        """Unmap all memory after pending GPU work. Earlier views become invalid."""
        gpu_memory.let_go(self)
        if self._mapped:
            torch.cuda.synchronize()
        for mapping, _ in self._mapped.values():
            mapping.close()
        for handle in itertools.chain.from_iterable(self._handles.values()):
            gpu_memory.release(handle)
        for entries in (self._mapped, self._handles, self._sizes):
            entries.clear()

    def _map(self, run: int) -> tuple[Mapping, torch.Tensor]:
        handles = self._handles.pop(run, None)
        if not handles:
            raise LocationError("an output in memory that was not announced")
        try:
            mapping = Mapping(handles, self._sizes.pop(run), writable=True)  # The judge marks outputs there.
        except CudaCallError as error:
            raise LocationError(f"the memory of an output cannot be mapped: {error}") from None
        return mapping, _view_of(mapping, mapping.nbytes)


class ProcessMemory:
    """A sealed process's host memory, which the judge can only read.

    The process opens its own ``/proc/self/mem`` before any foreign code runs in it, and sends the descriptor. So the
    judge needs no privileges over the process. Unlike a process id, the descriptor can never refer to another process.
    """

    def __init__(self, descriptor: int) -> None:
        """Take ownership of the descriptor."""
        self.descriptor = descriptor

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)

    def read(self, address: int, into: torch.Tensor) -> None:
        """Copy a dense tensor's bytes. Raise EOFError if the process ended, and LocationError if it has no such memory.

        The pieces are read in random order. A process that reports completion too early cannot predict which piece it
        must finish first. ``into`` is a dense tensor of the same layout.
        """
        nbytes = into.nbytes
        if address < 0 or address + nbytes >= 1 << 63:
            raise LocationError("an output at an impossible address")
        own = memoryview((ctypes.c_char * nbytes).from_address(into.data_ptr())).cast("B")
        size = max(_LEAST_PIECE, -(-nbytes // _PIECES))
        pieces = list(range(0, nbytes, size))
        random.SystemRandom().shuffle(pieces)
        for begin in pieces:
            at, end = begin, min(begin + size, nbytes)
            while at < end:
                try:
                    count = os.preadv(self.descriptor, [own[at:end]], address + at)
                except OSError as error:
                    raise LocationError(f"an output in memory that it does not have: {error.strerror}") from None
                if count == 0:
                    raise EOFError
                at += count


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether a non-empty tensor of this layout fills its memory without gaps and without overlap."""
    return (
        len(stride) == len(shape)
        and min(stride, default=0) >= 0
        and is_apart(shape, stride)
        and sum(step * (size - 1) for step, size in zip(stride, shape, strict=True)) + 1 == math.prod(shape)
    )


def view_within(flat: torch.Tensor, location: Location, spec: TensorSpec) -> torch.Tensor:
    """Return the tensor at a claimed location in ``flat``, a tensor of bytes.

    Raise LocationError if it would exceed ``flat``, overlap itself, or has an impossible layout.
    """
    dtype, stride = spec.dtype, location.stride
    if dtype is None or len(stride) != len(spec.shape) or min(stride, default=0) < 0:
        raise LocationError("an output of an impossible layout")
    if not is_apart(spec.shape, stride):
        raise LocationError("an output that overlaps itself")
    extent = 1 + sum(step * (size - 1) for step, size in zip(stride, spec.shape, strict=True))
    end = location.offset + extent * dtype.itemsize
    if location.offset < 0 or location.offset % dtype.itemsize or end > flat.numel():
        raise LocationError("an output beyond the end of its claimed memory")
    return flat[location.offset : end].view(dtype).as_strided(spec.shape, stride)


def is_apart(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether no two elements overlap: each stride exceeds the extent of all dimensions with smaller strides."""
    extent = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1 and step < extent:
            return False
        extent += step * (size - 1)
    return True


def _view_of(mapping: Mapping, nbytes: int) -> torch.Tensor:
    return torch.as_tensor(_DeviceMemory(mapping.pointer, nbytes), device="cuda")


def _map(descriptor: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)


def _view(flat: torch.Tensor, spec: BufferSpec) -> torch.Tensor:
    if 0 in spec.shape:
        return torch.empty(spec.shape, dtype=spec.dtype, device=flat.device)
    return flat.view(spec.dtype).as_strided(spec.shape, spec.stride)
