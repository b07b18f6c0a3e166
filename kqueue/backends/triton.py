"""Triton. Gluon, a part of Triton, has the same compiler."""

from typing import Final

from kqueue.backends import Backend

TRITON: Final = Backend(
    name="triton",
    description="Triton kernels",
    modules=("triton",),
    distributions=("triton",),
    install="triton",
    triton=True,
    cpu=True,
    kernel_decorators=("jit", "autotune", "heuristics"),
    kernel_wrappers=("jit",),
    # torch's compiled variants of a kernel are numbered.
    kernel_names=(r"(?P<name>.+)_\d{1,4}",),
    compile_errors=(
        "triton.compiler.errors.CompilationError",
        "triton.compiler.errors.CompileTimeAssertionFailure",
        "triton.compiler.errors.UnsupportedLanguageConstruct",
        "triton.runtime.errors.PTXASError",
    ),
    resource_errors=("triton.runtime.errors.OutOfResources",),
    caches=("TRITON_HOME", "TRITON_CACHE_DIR"),
)
