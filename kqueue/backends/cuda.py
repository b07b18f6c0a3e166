"""CUDA C++, which torch's extension builder compiles. The source usually shows C++ too."""

from typing import Final

from kqueue.backends import Backend

CUDA: Final = Backend(
    name="cuda",
    description="CUDA C++ through torch's extension builder",
    words=r"cuda_sources?|.*\.cu",
    includes=("cpp",),
    extensions=True,
    compilers=("c++", "nvcc"),
)
