"""JAX with Pallas. Tensors cross by DLPack, which makes JAX's stream and torch's current stream wait for each other.

JAX has no cache on disk unless a variable names one, and sealed processes do not inherit it.
"""

from typing import Final

from kqueue.backends import Backend

JAX: Final = Backend(
    name="jax",
    description="JAX and Pallas",
    modules=("jax",),
    distributions=("jax",),
    install="jax[cuda{cuda}]",
    # XLA chooses libraries by itself.
    own_kernels=False,
    kernel_decorators=("jit", "kernel"),
    kernel_wrappers=("pallas_call",),
    kernel_namers=(("pallas_call", 2, ""),),
    kernel_names=(r"(?P<name>.+)_mosaic_gpu\w*",),
    # JaxRuntimeError is not among them, because XLA raises it for compilation, memory and execution alike.
    compile_errors=(
        "jax.errors.JAXTypeError",
        "jax.errors.JAXIndexError",
        "jax._src.pallas.mosaic_gpu.lowering.LoweringError",
        "jax._src.pallas.triton.lowering.LoweringError",
    ),
    # JAX would reserve three quarters of the GPU's memory at its first use.
    environment=(("XLA_PYTHON_CLIENT_PREALLOCATE", "false"),),
)
