"""cuTile. A launch names its stream, which must be torch's current stream."""

from typing import Final

from kqueue.backends import Backend

CUTILE: Final = Backend(
    name="cutile",
    description="cuTile kernels",
    modules=("cuda.tile",),
    distributions=("cuda-tile",),
    install="cuda-tile[tileiras]",
    compilers=("tileiras",),
    kernel_decorators=("kernel",),
    # The suffix encodes the calling convention and the parameters.
    kernel_names=(r"(?P<name>.+)_K\w*",),
    compile_errors=("cuda.tile._exception.TileError",),
    caches=("CUDA_TILE_CACHE_DIR", "CUDA_TILE_TEMP_DIR"),
)
