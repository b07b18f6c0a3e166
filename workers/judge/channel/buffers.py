"""Buffers that judge and candidate share, each an allocation of its own.

On a CPU a memfd; on a GPU ``cudaMalloc`` and a CUDA IPC handle (a handle exposes the whole allocation, so
nothing else may live in it; torch's caching allocator would put several tensors into one).

A GPU's outputs are not copied to the judge: the candidate exports the allocation that they lie in
(:class:`Exports`), and the judge opens that and copies them out itself (:class:`Imports`). A candidate that wrote
into memory of the judge's could leave a copy out that an honest one is timed with. The memory stays readable
when the candidate frees it, fails or dies, until the judge closes it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import torch

from workers.judge.channel.flags import memory
from workers.judge.channel.protocol import BufferSpec, Place, TensorSpec, Where

_PEER_ACCESS: Final = 1  # cudaIpcMemLazyEnablePeerAccess
_BUFFER_ID: Final = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID
#: Foreign allocations that are kept open at once.
_MOST_OPEN: Final = 64


class CudaCallError(RuntimeError):
    """A call into the CUDA runtime failed; ``error_code`` is its code."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} failed with CUDA error {code}")
        self.error_code = code


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


@cache
def cudart() -> Any:
    """The CUDA runtime that torch has loaded: another copy would keep error states of its own."""
    with open("/proc/self/maps") as maps:  # noqa: PTH123 -- not a file that pathlib can map
        for line in maps:
            path = line.split(maxsplit=5)[-1].strip()
            if "/libcudart.so" in path:
                return ctypes.CDLL(path)
    raise RuntimeError("torch has not loaded libcudart; is this a CUDA build of torch?")


def call(name: str, *arguments: Any) -> None:
    """Call into the CUDA runtime.

    Raises:
        CudaCallError: it answered an error, which is not left behind for others to find.
    """
    code = getattr(cudart(), name)(*arguments)
    if code:
        cudart().cudaGetLastError()
        raise CudaCallError(name, code)


def driver(name: str, *arguments: Any) -> None:
    """Call into the CUDA driver.

    Raises:
        CudaCallError: it answered an error.
    """
    code = getattr(_libcuda(), name)(*arguments)
    if code:
        raise CudaCallError(name, code)


@cache
def _libcuda() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _allocation(pointer: int) -> tuple[int, int]:
    """Beginning and size of the allocation that an address lies in."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    driver("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer))
    return base.value, size.value


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
        descriptor: the memory's descriptor to send beside the spec; None on a GPU.
    """

    def __init__(self, like: torch.Tensor) -> None:
        """Allocate room for a tensor of ``like``'s dtype, shape, strides and device type.

        Strides are kept where they describe a dense tensor; any other layout becomes contiguous.

        Raises:
            CudaCallError: the device has no such memory left.
        """
        model = torch.empty_like(like, device="meta", memory_format=torch.preserve_format)
        nbytes = max(model.numel() * model.element_size(), 1)
        self.descriptor: int | None = None
        handle: bytes | None = None
        if like.is_cuda:
            # The runtime gives IPC handles for whole 2 MiB pages; a smaller allocation may share its page
            # with a neighbour that would be exposed with it.
            pointer = ctypes.c_void_p()
            call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(-(-nbytes // (2 << 20)) * (2 << 20)))
            handle = _handle_of(pointer.value or 0)
            flat = torch.as_tensor(_DeviceMemory(pointer.value or 0, nbytes), device=like.device)
        else:
            self.descriptor = memory("kqueue-buffer", nbytes)
            flat = _map(self.descriptor, nbytes)
        self.spec = BufferSpec(nbytes, like.dtype, tuple(like.shape), model.stride(), handle)
        self.flat = flat
        self.tensor = _view(flat, self.spec)

    def poison(self) -> None:
        """Fill the buffer with ones: NaN in every floating dtype, so that what is not written shows."""
        self.flat.fill_(0xFF)

    def close(self) -> None:
        """Forget the memory's descriptor, once the other side has it."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def form_of(tensor: torch.Tensor) -> BufferSpec:
    """A tensor's form, for the side that brings the memory itself."""
    return BufferSpec(tensor.nbytes, tensor.dtype, tuple(tensor.shape), tensor.stride(), None)


def open_buffer(spec: BufferSpec, descriptor: int | None) -> torch.Tensor:
    """Open a buffer that the other side allocated, as the tensor that lives in it."""
    if spec.handle is not None:
        flat = torch.as_tensor(_DeviceMemory(_address_of(spec.handle), spec.nbytes), device="cuda")
    else:
        assert descriptor is not None
        flat = _map(descriptor, spec.nbytes)
    return _view(flat, spec)


class Exports:
    """Handles of this process's own allocations; asking for one takes longer than remembering it."""

    def __init__(self) -> None:
        self._handles: dict[tuple[int, int], bytes] = {}

    def place(self, tensor: torch.Tensor) -> Place:
        """Where a tensor on the GPU lies.

        Raises:
            CudaCallError: its memory cannot be shared: it does not come from ``cudaMalloc``.
        """
        base, _ = _allocation(tensor.data_ptr())
        serial = ctypes.c_uint64()
        driver("cuPointerGetAttribute", ctypes.byref(serial), _BUFFER_ID, ctypes.c_uint64(base))
        key = (base, serial.value)
        if key not in self._handles:
            self._handles[key] = _handle_of(base)
        return Place(
            Where.EXPORTED,
            handle=self._handles[key],
            serial=serial.value,
            offset=tensor.data_ptr() - base,
            stride=tensor.stride(),
        )


class PlaceError(ValueError):
    """Where an output is said to lie there cannot be one."""


class Imports:
    """Allocations of the other side, opened to read outputs from them."""

    def __init__(self) -> None:
        self._opened: dict[tuple[bytes, int], torch.Tensor] = {}

    def view(self, place: Place, spec: TensorSpec) -> torch.Tensor:
        """The tensor at a place of the other side's.

        Raises:
            PlaceError: there is no such allocation, or the tensor would not lie within it.
        """
        key = (place.handle, place.serial)
        if key not in self._opened:
            self._opened[key] = self._open(place.handle)
        return view_within(self._opened[key], place, spec)

    def make_room(self, many: int) -> None:
        """See to it that ``many`` more can be opened. Views that were taken before are gone then."""
        if len(self._opened) + many > _MOST_OPEN:
            self.close()

    def close(self) -> None:
        """Close all; what is still being read from them is waited for."""
        torch.cuda.synchronize()
        for flat in self._opened.values():
            call("cudaIpcCloseMemHandle", ctypes.c_void_p(flat.data_ptr()))
        self._opened.clear()

    def _open(self, handle: bytes) -> torch.Tensor:
        try:
            base, size = _allocation(_address_of(handle))
        except CudaCallError as error:
            raise PlaceError(f"the memory of an output cannot be opened: {error}") from None
        return torch.as_tensor(_DeviceMemory(base, size), device="cuda")


def view_within(flat: torch.Tensor, place: Place, spec: TensorSpec) -> torch.Tensor:
    """The tensor that is said to lie at an offset of ``flat``, a tensor of bytes.

    Raises:
        PlaceError: it would reach beyond, lie over itself, or has an impossible layout.
    """
    dtype, stride = spec.dtype, place.stride
    if dtype is None or len(stride) != len(spec.shape) or min(stride, default=0) < 0:
        raise PlaceError("an output of an impossible layout")
    if not is_apart(spec.shape, stride):
        raise PlaceError("an output that lies over itself")
    extent = 1 + sum(step * (size - 1) for step, size in zip(stride, spec.shape, strict=True))
    end = place.offset + extent * dtype.itemsize
    if place.offset < 0 or place.offset % dtype.itemsize or end > flat.numel():
        raise PlaceError("an output beyond the memory that it is said to lie in")
    return flat[place.offset : end].view(dtype).as_strided(spec.shape, stride)


def is_apart(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether no two elements of such a tensor share memory: each step passes over all that lies within it."""
    extent = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1 and step < extent:
            return False
        extent += step * (size - 1)
    return True


def _handle_of(base: int) -> bytes:
    """What opens one of this process's allocations in another."""
    handle = _IpcHandle()
    call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(base))
    return bytes(handle)


def _address_of(handle: bytes) -> int:
    """Where another process's allocation begins in this one, now that it is open here."""
    pointer = ctypes.c_void_p()
    call("cudaIpcOpenMemHandle", ctypes.byref(pointer), _IpcHandle.from_buffer_copy(handle), _PEER_ACCESS)
    return pointer.value or 0


def _map(descriptor: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)


def _view(flat: torch.Tensor, spec: BufferSpec) -> torch.Tensor:
    if 0 in spec.shape:
        return torch.empty(spec.shape, dtype=spec.dtype, device=flat.device)
    return flat.view(spec.dtype).as_strided(spec.shape, spec.stride)
