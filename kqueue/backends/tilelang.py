"""TileLang. nvcc compiles its CUDA C++, and a kernel is launched on torch's current stream."""

from typing import Final

from kqueue.backends import Backend

TILELANG: Final = Backend(
    name="tilelang",
    description="TileLang kernels",
    modules=("tilelang",),
    distributions=("tilelang",),
    install="tilelang",
    compilers=("c++", "nvcc"),
    kernel_decorators=("jit", "prim_func"),
    # Further kernels of a function are numbered.
    kernel_names=(r"(?P<name>.+?)_kernel(_\d{1,4})?",),
    # Its checks raise TVM's InternalError. Errors of nvcc and of Python's own in a kernel are builtin exceptions.
    compile_errors=(
        "tilelang.jit.exceptions.EagerJITBuildError",
        "tilelang.jit.exceptions.JITNoBuilderError",
        "tvm.error.DiagnosticError",
        "tvm.error.InternalError",
    ),
    caches=("TILELANG_CACHE_DIR",),
)
