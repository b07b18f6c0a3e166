"""Initialisation of Triton's compiler in the fork server, so that candidates inherit it.

At its first compilation in a process, Triton hashes all its files, queries the assembler's version, and initialises the
compiler. A forked process inherits the result. Triton also compiles a driver library, the same for all kernels, unless
its cache has one. That library is copied into each candidate's cache.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Final, NoReturn

#: The variable that names Triton's cache.
_CACHE: Final = "TRITON_CACHE_DIR"
#: Time limit in seconds for the compilation of the driver library.
_COMPILE_S: Final = 60.0
#: A GPU that all assemblers support: backend, compute capability, and threads of a warp.
_ANY_GPU: Final = ("cuda", 80, 32)


def prepare() -> dict[str, bytes]:
    """Initialise Triton in this process without using a GPU.

    Returns:
        files for candidates' caches, by their paths in a cache. There are none without a GPU, Triton or a compiler.
        Candidates then compile the library themselves, or fail.
    """
    if not os.environ.get("CUDA_VISIBLE_DEVICES"):
        return {}
    with tempfile.TemporaryDirectory() as cache, cached_in(cache), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(Exception):
            _compile_first_kernel()
        return _driver_library(cache)


def put(files: dict[str, bytes]) -> None:
    """Write the files of :func:`prepare` into this process's cache. Stop if the disk is full."""
    with contextlib.suppress(OSError):
        for name, content in files.items():
            path = Path(os.environ[_CACHE], name)
            path.parent.mkdir(parents=True)
            path.write_bytes(content)


@contextlib.contextmanager
def cached_in(cache: str) -> Generator[None]:
    """Make Triton use another cache during the block."""
    before = os.environ.get(_CACHE)
    os.environ[_CACHE] = cache
    try:
        yield
    finally:
        del os.environ[_CACHE]
        if before is not None:
            os.environ[_CACHE] = before


def _compile_first_kernel() -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile  # noqa: A004

    from workers.judge.forkserver import first_kernel

    source = ASTSource(first_kernel.normalise, signature=first_kernel.SIGNATURE, constexprs=first_kernel.CONSTANTS)
    compile(source, target=GPUTarget(*_ANY_GPU))


def _driver_library(cache: str) -> dict[str, bytes]:
    """Compile the library in a child process, because Triton then also loads it and the driver."""
    before = set(Path(cache).rglob("*.so"))
    pid = os.fork()
    if pid == 0:
        _load_driver_library()
    deadline = time.monotonic() + _COMPILE_S
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)  # its children become orphans, which the fork server kills
        time.sleep(0.01)
    compiled = set(Path(cache).rglob("*.so")) - before
    return {str(path.relative_to(cache)): path.read_bytes() for path in compiled}


def _load_driver_library() -> NoReturn:
    """Compile and load the library in the child process, and exit. Errors are ignored."""
    try:
        devnull = os.open(os.devnull, os.O_RDWR)
        os.dup2(devnull, 1)
        os.dup2(devnull, 2)
        importlib.import_module("triton.backends.nvidia.driver").CudaUtils()
    finally:
        os._exit(0)
