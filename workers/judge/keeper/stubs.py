"""Triton's library for talking to the driver, which it compiles in every process that finds none in its cache.

It is the same for all kernels. So a fork server has it compiled once, and puts it into each candidate's own cache.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Final, NoReturn

#: The variable that names Triton's cache.
_CACHE: Final = "TRITON_CACHE_DIR"
#: How long compiling may take, in seconds.
_COMPILE_S: Final = 60.0


def build() -> dict[str, bytes]:
    """Have Triton compile it, in a child process that ends before this returns.

    Returns:
        the files by their places in a cache; none where there is no GPU, no Triton or no compiler. Candidates then
        compile it themselves, or fail at that.
    """
    if not os.environ.get("CUDA_VISIBLE_DEVICES"):
        return {}
    with tempfile.TemporaryDirectory() as cache:
        pid = os.fork()
        if pid == 0:
            _compile(cache)
        deadline = time.monotonic() + _COMPILE_S
        while not os.waitpid(pid, os.WNOHANG)[0]:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)  # what it started is killed as an orphan
            time.sleep(0.01)
        return {str(path.relative_to(cache)): path.read_bytes() for path in Path(cache).rglob("*.so")}


def _compile(cache: str) -> NoReturn:
    """In the child: end with the library in the cache, or without."""
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        os.environ[_CACHE] = cache
        importlib.import_module("triton.backends.nvidia.driver").CudaUtils()
    finally:
        os._exit(0)


def put(files: dict[str, bytes]) -> None:
    """Put what :func:`build` has returned into this process's cache, if that has room for it."""
    with contextlib.suppress(OSError):
        for name, content in files.items():
            place = Path(os.environ[_CACHE], name)
            place.parent.mkdir(parents=True)
            place.write_bytes(content)
