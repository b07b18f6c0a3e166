"""Buffers that judge and candidate share, each an allocation of its own.

On a CPU a memfd; on a GPU ``cudaMalloc`` and a CUDA IPC handle (a handle exposes the whole allocation, so
nothing else may live in it; torch's caching allocator would put several tensors into one). The GPU's memory
is that of the process that allocated it, and stays valid for the other until it is freed there.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache
from typing import Any, Final

import torch

from workers.channel.flags import memory
from workers.channel.protocol import BufferSpec

_PEER_ACCESS: Final = 1  # cudaIpcMemLazyEnablePeerAccess


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


def _call(name: str, *arguments: Any) -> None:
    code = getattr(cudart(), name)(*arguments)
    if code:
        raise CudaCallError(name, code)


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
            _call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(-(-nbytes // (2 << 20)) * (2 << 20)))
            ipc = _IpcHandle()
            _call("cudaIpcGetMemHandle", ctypes.byref(ipc), pointer)
            handle = bytes(ipc)
            flat = torch.as_tensor(_DeviceMemory(pointer.value or 0, nbytes), device=like.device)
        else:
            self.descriptor = memory("kqueue-buffer", nbytes)
            flat = _map(self.descriptor, nbytes)
        self.spec = BufferSpec(nbytes, like.dtype, tuple(like.shape), model.stride(), handle)
        self._flat = flat
        self.tensor = _view(flat, self.spec)

    def poison(self) -> None:
        """Fill the buffer with ones: NaN in every floating dtype, so that what is not written shows."""
        self._flat.fill_(0xFF)

    def close(self) -> None:
        """Forget the memory's descriptor, once the other side has it."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def open_buffer(spec: BufferSpec, descriptor: int | None) -> torch.Tensor:
    """Open a buffer that the other side allocated, as the tensor that lives in it."""
    if spec.handle is not None:
        pointer = ctypes.c_void_p()
        _call("cudaIpcOpenMemHandle", ctypes.byref(pointer), _IpcHandle.from_buffer_copy(spec.handle), _PEER_ACCESS)
        flat = torch.as_tensor(_DeviceMemory(pointer.value or 0, spec.nbytes), device="cuda")
    else:
        assert descriptor is not None
        flat = _map(descriptor, spec.nbytes)
    return _view(flat, spec)


def _map(descriptor: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)


def _view(flat: torch.Tensor, spec: BufferSpec) -> torch.Tensor:
    if 0 in spec.shape:
        return torch.empty(spec.shape, dtype=spec.dtype, device=flat.device)
    return flat.view(spec.dtype).as_strided(spec.shape, spec.stride)
