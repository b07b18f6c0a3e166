"""CuPy. NVRTC compiles a raw kernel at its first launch."""

import contextlib
from typing import Any, Final

from kqueue.backends import Backend


def use_torch_memory(cupy: Any, torch: Any) -> None:
    """Make CuPy allocate from torch, whose memory the judge can map. CuPy's own memory would need copies."""

    def allocate(nbytes: int, device: int) -> int:
        return torch.cuda.caching_allocator_alloc(nbytes, device, cupy.cuda.get_current_stream().ptr)

    def free(pointer: int, device: int) -> None:  # noqa: ARG001
        torch.cuda.caching_allocator_delete(pointer)

    with contextlib.suppress(AttributeError):  # another module of that name
        cupy.cuda.set_allocator(cupy.cuda.PythonFunctionAllocator(allocate, free).malloc)


CUPY: Final = Backend(
    name="cupy",
    description="CuPy's raw kernels",
    modules=("cupy",),
    distributions=("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x"),
    install="cupy-cuda{cuda}x",
    kernel_decorators=("rawkernel", "fuse"),
    kernel_wrappers=("rawkernel", "fuse"),
    kernel_namers=(
        ("RawKernel", 1, ""),
        ("ElementwiseKernel", 3, "kernel"),
        ("ReductionKernel", 6, "reduce_kernel"),
        ("fuse", 1, ""),
    ),
    # A reduction takes two passes.
    kernel_names=(r"(?P<name>.+)_pass[12]",),
    library="cupy_",
    compile_errors=("cupy.cuda.compiler.CompileException",),
    memory_errors=("cupy.cuda.memory.OutOfMemoryError",),
    caches=("CUPY_CACHE_DIR",),
    prepare=use_torch_memory,
)
