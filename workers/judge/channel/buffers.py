"""Buffers that the judge shares with a sealed process, each an allocation of its own, each named by a descriptor.

On a CPU a buffer is a memfd, on a GPU an allocation of CUDA's virtual memory management
(:mod:`workers.judge.channel.gpu_memory`). A descriptor opens that one allocation and nothing else.

The judge shares the inputs. Outputs stay where the process has them, and the judge copies them itself. A candidate
that wrote into the judge's memory could leave out a copy that an honest one is timed with. On a GPU the process exports
the allocations that outputs lie in (:class:`Exports`) and the judge maps those (:class:`Imports`); what the judge has
mapped stays readable when the process frees it, fails or dies. On a CPU the judge reads the process's memory
(:class:`ProcessMemory`).
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
from workers.judge.channel.protocol import MAX_EXPORTED, BufferSpec, Export, Location, ProtocolError, TensorSpec, Where

#: Runs that a process announces before it starts over, and how many the judge takes; one call has 32 at most.
_MANY_RUNS: Final = 16
_MOST_RUNS: Final = 512
#: In how many pieces a tensor is read from a process's memory, and the least of a piece, in bytes.
_PIECES: Final = 64
_LEAST_PIECE: Final = 16 << 10


class _DeviceMemory:
    """Raw device memory as torch can adopt it; kept alive by the tensor that views it."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


class SharedTensor:
    """A tensor in a shared buffer, on the side that allocated it.

    Attributes:
        tensor: the tensor, uninitialised.
        flat: the bytes that it lies in.
        spec: what the other side needs to open it.
        descriptor: the memory's descriptor, to send beside the spec; None once it is closed.
    """

    def __init__(self, like: torch.Tensor) -> None:
        """Allocate room for a tensor of ``like``'s dtype, shape, strides and device type.

        Strides are kept where they describe a dense tensor; any other layout becomes contiguous.

        Raises:
            CudaCallError: the device has no such memory left.
        """
        model = torch.empty_like(like, device="meta", memory_format=torch.preserve_format)
        nbytes = max(model.numel() * model.element_size(), 1)
        self._mapping: Mapping | None = None
        self.descriptor: int | None
        if like.is_cuda:
            self._mapping, self.descriptor = gpu_memory.allocate(nbytes)
            flat = _view_of(self._mapping, nbytes)
        else:
            self.descriptor = memory("kqueue-buffer", nbytes)
            flat = _map(self.descriptor, nbytes)
        self.spec = BufferSpec(nbytes, like.dtype, tuple(like.shape), model.stride(), like.device.type)
        self.flat = flat
        self.tensor = _view(flat, self.spec)

    def close(self) -> None:
        """Forget the memory's descriptor, once the other side has it."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def free(self) -> None:
        """Give the memory back. Nothing may use the tensor any more, nor work on it be under way."""
        self.close()
        if self._mapping is not None:
            self._mapping.close()


def form_of(tensor: torch.Tensor) -> BufferSpec:
    """Return a tensor's form, for the side that brings the memory itself."""
    return BufferSpec(tensor.nbytes, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device.type)


class OpenedBuffer:
    """A tensor in a buffer that the other side allocated.

    Attributes:
        tensor: the tensor.
    """

    def __init__(self, spec: BufferSpec, descriptor: int) -> None:
        """Map the buffer; the descriptor is closed."""
        self._mapping: Mapping | None = None
        if spec.device == "cpu":
            flat = _map(descriptor, spec.nbytes)
            os.close(descriptor)
        else:
            self._mapping = gpu_memory.open_descriptor(descriptor, spec.nbytes)
            flat = _view_of(self._mapping, spec.nbytes)
        self.tensor = _view(flat, spec)

    def close(self) -> None:
        """Unmap it. Nothing may use the tensor any more, nor work on it be under way."""
        if self._mapping is not None:
            self._mapping.close()


#: So many allocations are asked for one by one each time.
_LONG: Final = 4
#: Allocations one behind the other, by address and serial number.
_Run = tuple[tuple[int, int], ...]


class Exports:
    """The GPU allocations that this process has told the judge of.

    Torch's memory is of many allocations, and the driver must be asked of each where it is: 5 ms for 300 of them. So
    what was found is used again while torch has neither taken memory of the device nor given any back.
    """

    def __init__(self) -> None:
        self._runs: dict[_Run, int] = {}
        #: Records that must reach the judge before a reply that refers to them.
        self._pending: list[Export] = []
        #: The runs that ranges of addresses were found to lie in, and what torch had taken and given back until then.
        self._found: dict[tuple[int, int], _Run] = {}
        self._found_after = (0, 0)
        #: What it had when all runs were seen to be where they were.
        self._seen_after = (0, 0)

    def begin(self) -> None:
        """Begin with the outputs of a call: start over where there are many runs, or where memory was given back.

        The judge holds on to what it was told of; a run that is numbered 0 again tells it to let go of the others.
        """
        seen_after = self._seen_after
        if any(len(run) > _LONG for run in self._runs):
            self._seen_after = _taken_and_given()
        long = _LONG if seen_after == self._seen_after else math.inf
        if len(self._runs) >= _MANY_RUNS or not all(
            _is_alive(_ends(run) if len(run) > long else run) for run in self._runs
        ):
            self.forget()

    def forget(self) -> None:
        """Announce everything anew from now on."""
        self._runs.clear()
        self._found.clear()

    def location(self, tensor: torch.Tensor) -> Location:
        """Return where a tensor on the GPU lies; what the judge does not know of is announced by :meth:`pending`.

        Raises:
            CudaCallError: its memory cannot be shared: it comes from ``cudaMalloc``, for instance.
        """
        begin = tensor.data_ptr()
        extent = 1 + sum(step * (size - 1) for step, size in zip(tensor.stride(), tensor.shape, strict=True))
        run = self._run_of(begin, begin + extent * tensor.element_size())
        number = self._runs.get(run)
        if number is None:
            number = self._runs[run] = self._announce(run)
        return Location(Where.EXPORTED, run=number, offset=begin - run[0][0], stride=tensor.stride())

    def _run_of(self, begin: int, end: int) -> _Run:
        """Return the allocations that a range of addresses lies in."""
        known = self._found.get((begin, end))
        if known is not None and _taken_and_given() == self._found_after and _is_alive(_ends(known)):
            return known
        allocations: list[tuple[int, int]] = []
        at = begin
        while at < end:
            base, size = gpu_memory.range_of(at)
            allocations.append((base, gpu_memory.serial_of(base)))
            at = base + size
        run = tuple(allocations)
        if len(run) > _LONG:
            if (now := _taken_and_given()) != self._found_after:
                self._found, self._found_after = {}, now
            self._found[begin, end] = run
        return run

    def announce_memory(self) -> None:
        """Announce all of this process's memory, for a device whose outputs lie there."""
        descriptor = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        self._pending.append(Export(0, 1, (0,), (descriptor,)))

    def pending(self) -> list[Export]:
        """Return what must be sent before the next reply. The caller closes the descriptors."""
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


def _taken_and_given() -> tuple[int, int]:
    """Return what torch has taken of the device's memory and given back so far, in bytes."""
    reserved = torch.cuda.memory_stats_as_nested_dict()["reserved_bytes"]["all"]
    return reserved["allocated"], reserved["freed"]


def _ends(run: _Run) -> _Run:
    """Return the first and the last allocation: they tell of most changes of memory that is not torch's."""
    return run[:1] + run[-1:]


def _is_alive(run: _Run) -> bool:
    """Return whether allocations are still where they were."""
    try:
        return all(gpu_memory.serial_of(base) == serial for base, serial in run)
    except CudaCallError:
        return False


class LocationError(ValueError):
    """Where an output is said to lie there cannot be one."""


class Imports:
    """Memory of a sealed process that the judge has mapped, to read outputs from it."""

    def __init__(self) -> None:
        self._handles: dict[int, list[ctypes.c_uint64]] = {}
        self._sizes: dict[int, list[int]] = {}
        self._mapped: dict[int, tuple[Mapping, torch.Tensor]] = {}

    def __len__(self) -> int:
        """Return how many runs are known."""
        return len(self._handles) + len(self._mapped)

    def add(self, export: Export) -> None:
        """Take a part of a run; its descriptors are closed.

        Raises:
            ProtocolError: the run cannot be what is announced.
        """
        if export.run == 0 and not 0 < len(self._handles.get(0, ())) < export.total:
            self.close()
        gpu_memory.hold(self)
        handles = self._handles.setdefault(export.run, [])
        sizes = self._sizes.setdefault(export.run, [])
        try:
            if len(self) > _MOST_RUNS or len(handles) + len(export.descriptors) > export.total:
                raise ProtocolError("more memory was announced than there can be")
            for descriptor, size in zip(export.descriptors, export.sizes, strict=True):
                handles.append(gpu_memory.import_handle(descriptor))
                sizes.append(size)
        except CudaCallError as error:
            raise ProtocolError(f"memory was announced that cannot be opened: {error}") from None
        finally:
            for descriptor in export.descriptors:
                os.close(descriptor)

    def view(self, location: Location, spec: TensorSpec) -> torch.Tensor:
        """Return the tensor at a place of the other side's.

        Raises:
            LocationError: there is no such memory, or the tensor would not lie within it.
        """
        if location.run not in self._mapped:
            self._mapped[location.run] = self._map(location.run)
        return view_within(self._mapped[location.run][1], location, spec)

    def close(self) -> None:
        """Let go of all; what is still being read from it is waited for. Views that were taken are gone then."""
        gpu_memory.let_go(self)
        if self._mapped:
            torch.cuda.synchronize()
        for mapping, _ in self._mapped.values():
            mapping.close()
        for handle in itertools.chain.from_iterable(self._handles.values()):
            gpu_memory.release(handle)
        for known in (self._mapped, self._handles, self._sizes):
            known.clear()

    def _map(self, run: int) -> tuple[Mapping, torch.Tensor]:
        handles = self._handles.pop(run, None)
        if not handles:
            raise LocationError("an output in memory that was not announced")
        try:
            mapping = Mapping(handles, self._sizes.pop(run), writable=False)
        except CudaCallError as error:
            raise LocationError(f"the memory of an output cannot be mapped: {error}") from None
        return mapping, _view_of(mapping, mapping.nbytes)


class ProcessMemory:
    """A sealed process's memory, which the judge may only read.

    The process opens its own ``/proc/self/mem`` before any foreign code runs in it, and sends the descriptor. So the
    judge needs no rights over the process, in any fleet. The descriptor stands for this memory alone: unlike a process
    id it never comes to mean another process.
    """

    def __init__(self, descriptor: int) -> None:
        """Take the descriptor, which :meth:`close` closes."""
        self.descriptor = descriptor

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)

    def read(self, address: int, into: torch.Tensor) -> None:
        """Copy a dense tensor's bytes.

        The pieces come in random order. A process that said too early that it was done would have to be ahead of
        whichever piece comes first.

        Args:
            address: where they begin.
            into: a dense tensor of the same layout.

        Raises:
            LocationError: the process has no such memory.
            EOFError: it has ended.
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
    """Return whether such a tensor, which is not empty, fills its memory without gaps and without lying over itself."""
    return (
        len(stride) == len(shape)
        and min(stride, default=0) >= 0
        and is_apart(shape, stride)
        and sum(step * (size - 1) for step, size in zip(stride, shape, strict=True)) + 1 == math.prod(shape)
    )


def view_within(flat: torch.Tensor, location: Location, spec: TensorSpec) -> torch.Tensor:
    """The tensor that is said to lie at an offset of ``flat``, a tensor of bytes.

    Raises:
        LocationError: it would reach beyond, lie over itself, or has an impossible layout.
    """
    dtype, stride = spec.dtype, location.stride
    if dtype is None or len(stride) != len(spec.shape) or min(stride, default=0) < 0:
        raise LocationError("an output of an impossible layout")
    if not is_apart(spec.shape, stride):
        raise LocationError("an output that lies over itself")
    extent = 1 + sum(step * (size - 1) for step, size in zip(stride, spec.shape, strict=True))
    end = location.offset + extent * dtype.itemsize
    if location.offset < 0 or location.offset % dtype.itemsize or end > flat.numel():
        raise LocationError("an output beyond the memory that it is said to lie in")
    return flat[location.offset : end].view(dtype).as_strided(spec.shape, stride)


def is_apart(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether no two elements of such a tensor share memory: each step passes over all that lies within it."""
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
