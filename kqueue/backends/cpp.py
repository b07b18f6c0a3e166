"""C++ for the CPU, or on torch's operators, which torch's extension builder compiles."""

from typing import Final

from kqueue.backends import Backend

CPP: Final = Backend(
    name="cpp",
    description="C++ through torch's extension builder",
    words=r"cpp_sources?|.*\.cpp",
    extensions=True,
    compilers=("c++",),
    cpu=True,
    own_kernels=False,
)
