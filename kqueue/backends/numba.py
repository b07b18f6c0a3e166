"""Numba's CUDA kernels, which a launch puts on the stream that it names: ``cuda.external_stream`` of torch's."""

from typing import Final

from kqueue.backends import Backend

NUMBA: Final = Backend(
    name="numba",
    description="Numba's CUDA kernels",
    modules=("numba.cuda",),
    distributions=("numba-cuda", "numba"),
    install="numba-cuda[cu{cuda}]",
    kernel_decorators=("jit",),
    kernel_wrappers=("jit",),
    # Compilers raise subclasses of NumbaError. The second one is for a numba.cuda that has its own. Current versions
    # call NVVM, NVRTC and the linker through cuda-core and cuda-bindings, which raise other exceptions.
    compile_errors=(
        "cuda.bindings.nvjitlink.nvJitLinkError",
        "cuda.bindings.nvvm.nvvmError",
        "cuda.core._utils.cuda_utils.NVRTCError",
        "numba.core.errors.NumbaError",
        "numba.cuda.core.errors.NumbaError",
        "numba.core.errors.UnsupportedBytecodeError",
        "numba.cuda.core.errors.UnsupportedBytecodeError",
        "numba.cuda.errors.UnsupportedBytecodeError",
        "numba.cuda.cudadrv.driver.LinkerError",
        "numba.cuda.cudadrv.error.NvrtcError",
        "numba.cuda.cudadrv.error.NvvmError",
    ),
    caches=("NUMBA_CACHE_DIR",),
)
