"""GPU memory that two processes share by file descriptor.

CUDA's virtual memory management exports an allocation as a POSIX file descriptor, and the receiving process maps it. A
descriptor names one allocation and cannot be forged: a process can map only the allocations that were sent to it over a
socket. A legacy CUDA IPC handle is 64 bytes that name a process and an object. By editing them, a process could open
other exported allocations.

Source: CUDA Driver API, "Virtual Memory Management".
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import byref, c_size_t, c_uint64
from functools import cache
from typing import Any, Final, Protocol

_PINNED: Final = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_ON_DEVICE: Final = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_DESCRIPTOR: Final = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_READ: Final = 1  # CU_MEM_ACCESS_FLAGS_PROT_READ
_READ_WRITE: Final = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_BUFFER_ID: Final = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID
#: Granularity of allocations in bytes.
_GRANULARITY: Final = 2 << 20


class Held(Protocol):
    """A CUDA resource of this process that torch does not manage."""

    def close(self) -> None:
        """Release the resource. Do nothing if it is released already."""
        ...


_held: set[Held] = set()


def hold(held: Held) -> None:
    """Register a resource that :func:`close_all` closes, until :func:`let_go` removes it."""
    _held.add(held)


def let_go(held: Held) -> None:
    """Remove a closed resource from the register."""
    _held.discard(held)


def close_all() -> None:
    """Release everything that this process has mapped, imported or registered. No GPU work must use it any more."""
    for held in list(_held):
        held.close()


class CudaCallError(RuntimeError):
    """Raised where a call into CUDA fails. ``error_code`` is CUDA's code."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} failed with CUDA error {code}")
        self.error_code = code


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("unused", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


@cache
def cudart() -> Any:
    """Return the CUDA runtime library that torch has loaded. Another copy would have a separate error state."""
    runtime = loaded_library("cudart")
    if runtime is None:
        raise RuntimeError("torch has not loaded libcudart; is this a CUDA build of torch?")
    return runtime


def loaded_library(name: str) -> Any:
    """Return a library that this process has loaded, by its name without ``lib``. Return None if it is not loaded."""
    with open("/proc/self/maps") as maps:  # noqa: PTH123 -- not a file that pathlib can map
        for line in maps:
            path = line.split(maxsplit=5)[-1].strip()
            if f"/lib{name}.so" in path:
                return ctypes.CDLL(path)
    return None


@cache
def _libcuda() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: Any) -> None:
    """Call a function of the CUDA runtime, or raise CudaCallError.

    Then the runtime's last error is cleared, so that later checks do not see it.
    """
    code = getattr(cudart(), name)(*arguments)
    if code:
        cudart().cudaGetLastError()
        raise CudaCallError(name, code)


def driver(name: str, *arguments: Any) -> None:
    """Call a function of the CUDA driver, or raise CudaCallError."""
    code = getattr(_libcuda(), name)(*arguments)
    if code:
        raise CudaCallError(name, code)


def _current() -> int:
    """Return the number of this thread's GPU, which is 0 except in groups."""
    number = ctypes.c_int()
    call("cudaGetDevice", byref(number))
    return number.value


class Mapping:
    """A range of this process's GPU addresses, backed by one or more allocations. ``pointer`` is the first address."""

    def __init__(self, handles: Sequence[c_uint64], sizes: Sequence[int], *, writable: bool) -> None:
        """Map allocations at consecutive addresses. Release ``handles``, even on failure."""
        self.pointer, self.nbytes = 0, 0
        self._sizes: list[int] = []
        reserved = c_uint64()
        total = sum(sizes)
        hold(self)
        try:
            driver("cuMemAddressReserve", byref(reserved), c_size_t(total), c_size_t(0), c_uint64(0), c_uint64(0))
            self.pointer, self.nbytes = reserved.value, total
            for handle, size in zip(handles, sizes, strict=True):
                at = c_uint64(self.pointer + sum(self._sizes))
                driver("cuMemMap", at, c_size_t(size), c_size_t(0), handle, c_uint64(0))
                self._sizes.append(size)
            access = _Access(_Location(_ON_DEVICE, _current()), _READ_WRITE if writable else _READ)
            driver("cuMemSetAccess", reserved, c_size_t(total), byref(access), c_size_t(1))
        except CudaCallError:
            self.close()
            raise
        finally:
            for handle in handles:  # the mapping keeps the memory alive
                driver("cuMemRelease", handle)

    def close(self) -> None:
        """Unmap the range. No GPU work must use it any more."""
        let_go(self)
        at, sizes, self._sizes = self.pointer, self._sizes, []
        for size in sizes:
            driver("cuMemUnmap", c_uint64(at), c_size_t(size))
            at += size
        if self.pointer:
            driver("cuMemAddressFree", c_uint64(self.pointer), c_size_t(self.nbytes))
            self.pointer = 0


def allocate(nbytes: int) -> tuple[Mapping, int]:
    """Create an allocation. Return its mapping and a descriptor with which another process can open it."""
    size = _rounded(nbytes)
    properties = _Properties(_PINNED, _DESCRIPTOR, _Location(_ON_DEVICE, _current()))
    handle = c_uint64()
    driver("cuMemCreate", byref(handle), c_size_t(size), byref(properties), c_uint64(0))
    try:
        descriptor = _descriptor_of(handle)
    except CudaCallError:
        driver("cuMemRelease", handle)
        raise
    return Mapping([handle], [size], writable=True), descriptor


def import_handle(descriptor: int) -> c_uint64:
    """Return the allocation that a descriptor names. The caller keeps the descriptor and must close it."""
    handle = c_uint64()
    driver("cuMemImportFromShareableHandle", byref(handle), ctypes.c_void_p(descriptor), _DESCRIPTOR)
    return handle


def release(handle: c_uint64) -> None:
    """Release an allocation that was imported and not mapped."""
    driver("cuMemRelease", handle)


def open_descriptor(descriptor: int, nbytes: int) -> Mapping:
    """Map an allocation of this size that another process made by :func:`allocate`, and close its descriptor."""
    try:
        handle = import_handle(descriptor)
    finally:
        os.close(descriptor)
    return Mapping([handle], [_rounded(nbytes)], writable=True)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _GRANULARITY) * _GRANULARITY


def range_of(pointer: int) -> tuple[int, int]:
    """Return the base address and the size of the allocation that contains an address."""
    base, size = c_uint64(), c_size_t()
    driver("cuMemGetAddressRange_v2", byref(base), byref(size), c_uint64(pointer))
    return base.value, size.value


def serial_of(base: int) -> int:
    """Return the allocation's buffer ID, which differs between successive allocations at the same address."""
    serial = c_uint64()
    driver("cuPointerGetAttribute", byref(serial), _BUFFER_ID, c_uint64(base))
    return serial.value


def export(base: int) -> int:
    """Return a descriptor of the allocation with the given base address.

    Raise CudaCallError if it cannot be exported, for example because ``cudaMalloc`` made it.
    """
    handle = c_uint64()
    driver("cuMemRetainAllocationHandle", byref(handle), ctypes.c_void_p(base))
    try:
        return _descriptor_of(handle)
    finally:
        driver("cuMemRelease", handle)


def _descriptor_of(handle: c_uint64) -> int:
    descriptor = ctypes.c_int()
    driver("cuMemExportToShareableHandle", byref(descriptor), handle, _DESCRIPTOR, c_uint64(0))
    os.set_inheritable(descriptor.value, False)
    return descriptor.value
