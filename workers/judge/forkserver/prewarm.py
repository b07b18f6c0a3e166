"""What Triton does once in every process that compiles a kernel, done ahead of all candidates in their fork server.

At its first compilation it hashes all its own files, asks the assembler for its version, and loads and sets up what
compiles. A forked process finds that done. And it compiles a library for talking to the driver, the same for all
kernels, if there is none in its cache: so it is put into each candidate's own cache.
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
#: How long compiling the library may take, in seconds.
_COMPILE_S: Final = 60.0
#: A GPU that all assemblers know: its kind, its compute capability, and the threads of a warp.
_ANY_GPU: Final = ("cuda", 80, 32)


def prepare() -> dict[str, bytes]:
    """Have Triton do in this process what it does once in each. No GPU is touched.

    Returns:
        files that candidates need in their caches, by their places there. Without a GPU, without Triton or a compiler
        there are none: candidates then do all of it themselves, or fail at that.
    """
    if not os.environ.get("CUDA_VISIBLE_DEVICES"):
        return {}
    with tempfile.TemporaryDirectory() as cache, cached_in(cache), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(Exception):
            _compile_first_kernel()
        return _driver_library(cache)


def put(files: dict[str, bytes]) -> None:
    """Put what :func:`prepare` has returned into this process's cache, if that has room for it."""
    with contextlib.suppress(OSError):
        for name, content in files.items():
            place = Path(os.environ[_CACHE], name)
            place.parent.mkdir(parents=True)
            place.write_bytes(content)


@contextlib.contextmanager
def cached_in(cache: str) -> Generator[None]:
    """Have Triton use another cache during the block."""
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
    """Have the library compiled in a child, as it is loaded then, and with it the driver."""
    known = set(Path(cache).rglob("*.so"))
    pid = os.fork()
    if pid == 0:
        _load_driver_library()
    deadline = time.monotonic() + _COMPILE_S
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)  # what it started is killed as an orphan
        time.sleep(0.01)
    made = set(Path(cache).rglob("*.so")) - known
    return {str(path.relative_to(cache)): path.read_bytes() for path in made}


def _load_driver_library() -> NoReturn:
    """In the child: end, with the library in the cache or without."""
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        importlib.import_module("triton.backends.nvidia.driver").CudaUtils()
    finally:
        os._exit(0)
