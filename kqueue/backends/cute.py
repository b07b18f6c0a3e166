"""CuTe DSL of CUTLASS. A kernel takes its stream as an argument, which must be torch's current stream."""

from typing import Final

from kqueue.backends import Backend

CUTE: Final = Backend(
    name="cute",
    description="CuTe DSL of CUTLASS",
    modules=("cutlass.cute",),
    distributions=("nvidia-cutlass-dsl",),
    install="nvidia-cutlass-dsl",
    kernel_decorators=("kernel",),
    # Types of the arguments and a number follow the name.
    kernel_names=(r"kernel_cutlass_(?P<name>\w+?)_(tensor\w*|\d+)",),
    # Its base class is also the base of DSLCudaRuntimeError, which is raised for launches.
    compile_errors=(
        "cutlass._mlir._mlir_libs._cutlass_ir._mlir.ir.MLIRError",
        "cutlass.base_dsl.common.DSLAstPreprocessorError",
        "cutlass.base_dsl.common.DSLNotImplemented",
        "cutlass.base_dsl.common.DSLOperationBuildError",
        "cutlass.base_dsl.common.DSLRuntimeError",
        "cutlass.base_dsl.common.DSLUserCodeError",
        "cutlass.base_dsl.compiler.CompilationError",
        "cutlass.base_dsl.compiler.CompilerDiagnosticError",
    ),
    caches=("CUTE_DSL_CACHE_DIR",),
)
