"""Libraries that torch's extension builder makes: compiled in a process of their own, imported by the candidate.

The builder is a process like the candidate, without a GPU, that imports the kernel's source and keeps each
library that it compiles under a key: the hash of what the builder was asked for. What it has kept is handed on by
the fork server (:mod:`workers.judge.sandbox.shelf`); the candidate asks for the same, finds the key, and imports.

Only a compiler's word counts of what happens in the builder. Wherever a module would go on otherwise than it does
beside a GPU, :class:`LeftToCandidateError` ends the build, and the candidate compiles what is not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import os
import shutil
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Final, NoReturn

import torch

from workers.judge.sandbox.shelf import MADE

#: Arguments of torch's builder on which the library does not depend; sources count by what they say.
_INCIDENTAL: Final = frozenset({"build_directory", "verbose", "keep_intermediates", "sources"})
_ARCHITECTURES: Final = "TORCH_CUDA_ARCH_LIST"
#: What the environment adds to a compiler's flags.
_NVCC_FLAGS: Final = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
#: Variables on which the library depends. A kernel that asks for the GPU behind torch's back may set them otherwise.
_HEEDED: Final = (
    *(_ARCHITECTURES, *_NVCC_FLAGS, "NVCC_CCBIN", "CC", "CXX"),
    *("CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH"),
)


class LeftToCandidateError(BaseException):
    """The build ends here. Not an ``Exception``, which kernels catch to take another way."""


def builder() -> Any:
    """torch's extension builder. Its version's private parts are used: there are no others to be had."""
    return importlib.import_module("torch.utils.cpp_extension")


def key(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], scratch: Path) -> str:
    """What tells one library from another: name, flags, the compilers' environment, and what the sources say.

    Args:
        original: torch's ``_jit_compile``.
        args: its positional arguments.
        kwargs: the others.
        scratch: the process's own directory, whose name differs between builder and candidate.

    Raises:
        OSError: a source cannot be read.
    """
    asked = inspect.signature(original).bind(*args, **kwargs).arguments
    told = repr(sorted((name, repr(value)) for name, value in asked.items() if name not in _INCIDENTAL))
    told += repr([os.environ.get(name) for name in _HEEDED])
    digest = hashlib.sha256(told.replace(str(scratch), "").encode())
    for source in map(Path, asked["sources"]):
        content = source.read_bytes()
        digest.update(f"{source.name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def prebuilt(
    shelf: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], scratch: Path
) -> tuple[str, str, bool] | None:
    """What to import instead of compiling, as arguments of torch's ``_import_module_from_library``; None for nothing.

    Args:
        shelf: where built libraries lie; empty where none are.
        original: torch's ``_jit_compile``.
        args: its positional arguments.
        kwargs: the others.
        scratch: the process's own directory.
    """
    if not shelf:
        return None
    asked = inspect.signature(original).bind(*args, **kwargs).arguments
    place = Path(shelf, key(original, args, kwargs, scratch))
    library = next(place.glob("*.so"), None)
    if library is None or asked["is_standalone"]:
        return None
    return library.stem, str(place), asked["is_python_module"]


class Keeper:
    """Keeps what torch's builder makes, in the builder."""

    def __init__(self, scratch: Path, architectures: str, not_compiling: Callable[[], None]) -> None:
        """Keep below ``scratch``.

        Args:
            scratch: the process's own directory.
            architectures: for which GPUs nvcc compiles where the kernel does not say; empty where there is none.
            not_compiling: told when a compiler is done and the library's own code runs.
        """
        self._scratch = scratch
        self._architectures = architectures
        self._not_compiling = not_compiling
        self._torch = builder()
        self._import = self._torch._import_module_from_library
        self._arch_flags = self._torch._get_cuda_arch_flags
        #: What each thread is building: kernels may build in several at once.
        self._building = threading.local()
        self._lock = threading.Lock()

    def build(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Have torch build, and keep the library."""
        asked = inspect.signature(original).bind(*args, **kwargs).arguments
        nvcc_flags = [*(asked.get("extra_cuda_cflags") or ()), *(os.environ.get(name, "") for name in _NVCC_FLAGS)]
        if self._architectures and any("native" in flag for flag in nvcc_flags):
            raise LeftToCandidateError("nvcc would ask the GPU what it is")
        with self._lock:  # while no other thread has the architectures named
            self._building.key = key(original, args, kwargs, self._scratch)
        return original(*args, **kwargs)

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Watch torch's builder; beside a GPU's candidate, also who asks for a GPU that is not here."""
        with contextlib.ExitStack() as patches:
            for name, stand_in in (
                ("_import_module_from_library", self._keep_and_import),
                ("_get_cuda_arch_flags", self._flags_for_architectures),
            ):
                patches.enter_context(_replaced(self._torch, name, stand_in))
            if self._architectures:
                for name in ("is_available", "device_count", "_lazy_init"):
                    patches.enter_context(_replaced(torch.cuda, name, _asks_for_gpu))
            yield

    def _keep_and_import(self, name: str, path: str, is_python_module: bool) -> Any:
        library = Path(path, f"{name}{self._torch.LIB_EXT}")
        place = self._scratch / MADE / self._building.key
        place.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(library, place / library.name)
        self._not_compiling()
        try:
            return self._import(name, path, is_python_module)
        except Exception as error:
            raise LeftToCandidateError(f"the library cannot be imported here: {error}") from error

    def _flags_for_architectures(self, *args: Any, **kwargs: Any) -> Any:
        # Not for longer: a kernel that names them only where nobody did must be heard.
        with self._lock:
            named = os.environ.get(_ARCHITECTURES)
            if named or not self._architectures:
                return self._arch_flags(*args, **kwargs)
            os.environ[_ARCHITECTURES] = self._architectures
            try:
                return self._arch_flags(*args, **kwargs)
            finally:
                del os.environ[_ARCHITECTURES]


@contextlib.contextmanager
def _replaced(module: Any, name: str, stand_in: Callable[..., Any]) -> Generator[None]:
    original = getattr(module, name)
    setattr(module, name, stand_in)
    try:
        yield
    finally:
        setattr(module, name, original)


def _asks_for_gpu(*_: Any, **__: Any) -> NoReturn:
    raise LeftToCandidateError("the module asks for the GPU when it is imported")
