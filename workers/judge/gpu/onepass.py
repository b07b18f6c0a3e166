"""The error measures of two tensors, computed in one pass over them on a GPU.

Torch's operations need about twenty passes: 0.11 s on an H100 for two tensors of 6 GiB, and an evaluation compares
eleven pairs. This kernel takes as long as reading both tensors. For two small tensors it takes 0.16 ms instead of 0.6
ms.

NVRTC, which is part of torch, compiles the kernel (``onepass.cu``) in memory. So no compiler of the host is needed, and
there is no cache that another process could write to. Without NVRTC, torch's operations are used.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, Final

import structlog
import torch

from workers.judge.channel.gpu_memory import driver, loaded_library

#: Numbers in the kernel of the dtypes that it is compiled for.
_KINDS: Final = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
#: Number of measures. The last two are maxima and the rest are sums.
_MEASURES: Final = 13
_MAXIMA: Final = 2
_THREADS: Final = 256
#: Number of blocks for each multiprocessor.
_BLOCKS: Final = 8
#: Number of bytes that a thread reads at once.
_VECTOR_BYTES: Final = 16

_log = structlog.get_logger(__name__)


def load(dtype: torch.dtype) -> None:
    """Compile and load the kernel for a dtype if it is supported. This takes about 0.1 s."""
    if dtype in _KINDS:
        _kernel(_KINDS[dtype], torch.cuda.current_device())


def measure(
    out: torch.Tensor,
    ref: torch.Tensor,
    exact: torch.Tensor | None,
    bounds: tuple[float, float],
    loose: tuple[float, float],
    far: float,
) -> torch.Tensor | None:
    """Return the measures of one output, in the order of ``compare``, without a wait for the device.

    Args:
        out, ref: an output and the reference's output: in one dimension, of one dtype and size, on a GPU.
        exact: the reference's output in float64, in the same form.
        bounds, loose: two tolerances, each absolute and relative.
        far: relative error from which a value is far off.

    Returns:
        Thirteen float64 numbers on the device. None if a tensor is not dense, if the dtype is not fp64, fp32, fp16 or
        bf16, or if the kernel could not be compiled.
    """
    kind = _KINDS.get(ref.dtype)
    if kind is None or not all(tensor is None or tensor.is_contiguous() for tensor in (out, ref, exact)):
        return None
    if (kernel := _kernel(kind, torch.cuda.current_device())) is None:
        return None
    most = _BLOCKS * torch.cuda.get_device_properties(ref.device).multi_processor_count
    blocks = min(most, -(-ref.nbytes // (_THREADS * _VECTOR_BYTES)))
    partial = torch.empty(blocks, _MEASURES, dtype=torch.float64, device=ref.device)
    pointers = [0 if tensor is None else tensor.data_ptr() for tensor in (out, ref, exact)]
    aligned = all(pointer % _VECTOR_BYTES == 0 for pointer in pointers[:2])
    arguments = (
        *map(ctypes.c_void_p, pointers),
        ctypes.c_longlong(ref.numel()),
        *map(ctypes.c_double, (*bounds, *loose, far)),
        ctypes.c_int(aligned),
        ctypes.c_void_p(partial.data_ptr()),
    )
    addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    driver("cuLaunchKernel", kernel, blocks, 1, 1, _THREADS, 1, 1, 0, stream, addresses, None)
    return torch.cat((partial[:, :-_MAXIMA].sum(0), partial[:, -_MAXIMA:].amax(0)))


@cache
def _kernel(kind: int, device: int) -> Any:
    """Return the loaded kernel for a dtype's number, or None if it cannot be compiled."""
    try:
        code = _compiled(kind, *torch.cuda.get_device_capability(device))
    except (OSError, RuntimeError) as error:
        _log.warning("tensors are compared by torch's operations, which takes longer", error=str(error))
        return None
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    driver("cuModuleLoadData", ctypes.byref(module), code)
    driver("cuModuleGetFunction", ctypes.byref(kernel), module, b"measure")
    return kernel


def _compiled(kind: int, major: int, minor: int) -> bytes:
    """Compile the kernel for a dtype's number and a GPU."""
    nvrtc: Any = loaded_library("nvrtc") or ctypes.CDLL(f"libnvrtc.so.{(torch.version.cuda or '').partition('.')[0]}")
    # No product is fused with a sum, so that the results equal the results of torch's operations.
    options = [f"--gpu-architecture=sm_{major}{minor}", f"-DKIND={kind}", "-fmad=false", "--std=c++17"]
    source = Path(__file__).with_suffix(".cu").read_bytes()
    program = ctypes.c_void_p()
    _check(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"onepass.cu", 0, None, None))
    try:
        texts = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        failed = nvrtc.nvrtcCompileProgram(program, len(options), texts)
        if failed:
            raise RuntimeError(_read(nvrtc, program, "ProgramLog").decode(errors="replace"))
        return _read(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(nvrtc: Any, program: ctypes.c_void_p, output: str) -> bytes:
    size = ctypes.c_size_t()
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{output}Size")(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{output}")(program, text))
    return text.raw


def _check(nvrtc: Any, code: int) -> None:
    if code:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(nvrtc.nvrtcGetErrorString(code).decode())
