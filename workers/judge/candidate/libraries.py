"""Libraries from torch's extension builder: compiled in the builder's process, imported by the candidate.

The builder is a process like the candidate, but without a GPU. It imports the kernel's source and keeps each library
that it compiles, under a key: the hash of the request to torch's builder. The fork server copies the libraries
(:mod:`workers.judge.sandbox.shelf`). The candidate makes the same request, finds the key, and imports the library.

Of everything that happens in the builder, only a compiler's result counts. Wherever a module would behave differently
with a GPU, :class:`LeftToCandidateError` ends the build, and the candidate compiles what is missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

import torch

from workers.judge.candidate import headers
from workers.judge.sandbox.shelf import MADE, REFUSED

#: Arguments of torch's builder that do not change the library. Sources count by their content.
_INCIDENTAL: Final = frozenset({"build_directory", "verbose", "keep_intermediates", "sources"})
_ARCHITECTURES: Final = "TORCH_CUDA_ARCH_LIST"
#: Variables that add to nvcc's flags.
_NVCC_FLAGS: Final = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
#: Variables that change the library. A kernel that detects the GPU without torch may set them differently.
_HEEDED: Final = (
    *(_ARCHITECTURES, *_NVCC_FLAGS, "NVCC_CCBIN", "CC", "CXX"),
    *("CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH"),
)


#: A compiler's complaint of a line of a source, as gcc and nvcc write it.
_DIAGNOSTIC: Final = re.compile(r"^\S+(?::\d+:\d+: (?:fatal )?error: |\(\d+\): error: )", re.MULTILINE)
#: Signs that the host had a part in it: of want of memory, processes, files or room, and of compilers that were killed
#: or fell over.
_TROUBLE: Final = re.compile(
    r"memory|\bkilled\b|signal|terminated|internal (?:compiler )?error|segmentation|no space left|too many open files"
    r"|resource temporarily|cannot (?:allocate|fork)|vfork|posix_spawn|input/output error|stale file|timed? ?out"
    r"|disk quota|read-only file system",
    re.IGNORECASE,
)
#: The most that is kept of what a compiler has said, from its end.
_REFUSAL_CHARACTERS: Final = 64 << 10


def is_lasting(told: str) -> bool:
    """Return whether a compiler that has refused a source would do so again, as far as its words show.

    The words of foreign code's compilers decide only whether that code is compiled once more.
    """
    return _DIAGNOSTIC.search(told) is not None and _TROUBLE.search(told) is None


class LeftToCandidateError(BaseException):
    """Ends the build. A ``BaseException``, because kernels catch ``Exception`` to use a fallback."""


def builder() -> Any:
    """Return torch's extension builder, whose private functions are used: there is no public interface."""
    return importlib.import_module("torch.utils.cpp_extension")


def key(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], scratch: Path) -> str:
    """Return a library's key: a hash of its name, flags, compilers' environment, and the content of its sources.

    Args:
        original: torch's ``_jit_compile``.
        args: its positional arguments.
        kwargs: its keyword arguments.
        scratch: the process's own directory, which differs between builder and candidate and so does not count.

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
    """Find the compiled library for a request to torch's builder.

    Args:
        shelf: the directory of compiled libraries; empty for none.
        original: torch's ``_jit_compile``.
        args: its positional arguments.
        kwargs: its keyword arguments.
        scratch: the process's own directory.

    Returns:
        arguments for torch's ``_import_module_from_library``; None if there is no such library.

    Raises:
        RuntimeError: the builder's compiler has refused the very same request.
    """
    if not shelf:
        return None
    asked = inspect.signature(original).bind(*args, **kwargs).arguments
    place = Path(shelf, key(original, args, kwargs, scratch))
    if (refusal := place / REFUSED).exists():
        raise RuntimeError(refusal.read_text(errors="replace"))
    library = next(place.glob("*.so"), None)
    if library is None or asked["is_standalone"]:
        return None
    return library.stem, str(place), asked["is_python_module"]


def note_lines() -> None:
    """Have nvcc note the lines of sources from now on. The instructions that it makes stay the same."""
    given = os.environ.get(_NVCC_FLAGS[1], "").split()
    if "-lineinfo" not in given:
        os.environ[_NVCC_FLAGS[1]] = " ".join([*given, "-lineinfo"])


@contextlib.contextmanager
def quick_compilers() -> Generator[None]:
    """Inside the ``with`` block, torch's builder compiles with fewer headers where they suffice, in all threads.

    It precompiles none: the folder that it would keep them in is read-only here, and an extension has no need of them.
    """
    torch_builder = builder()
    run = partial(headers.try_fewer, torch_builder._run_ninja_build)
    with (
        _replaced(torch_builder, "_run_ninja_build", run),
        _replaced(torch_builder, "_check_and_build_extension_h_precompiler_headers", _precompile_nothing),
    ):
        yield


def _precompile_nothing(*_: Any, **__: Any) -> None:
    pass


class Keeper:
    """Keeps the libraries that torch's builder compiles, in the builder's process."""

    def __init__(self, scratch: Path, architectures: str, not_compiling: Callable[[], None]) -> None:
        """Configure a keeper.

        Args:
            scratch: the process's own directory, under which the libraries are kept.
            architectures: nvcc's targets if the kernel names none; empty on a CPU slot.
            not_compiling: called when compiling is done and the library's own code runs.
        """
        self._scratch = scratch
        self._architectures = architectures
        self._not_compiling = not_compiling
        self._torch = builder()
        self._import = self._torch._import_module_from_library
        self._arch_flags = self._torch._get_cuda_arch_flags
        #: The key that each thread is building: kernels may build in several threads.
        self._building = threading.local()
        self._lock = threading.Lock()

    def build(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let torch build a library, and keep it."""
        asked = inspect.signature(original).bind(*args, **kwargs).arguments
        nvcc_flags = [*(asked.get("extra_cuda_cflags") or ()), *(os.environ.get(name, "") for name in _NVCC_FLAGS)]
        if self._architectures and any("native" in flag for flag in nvcc_flags):
            raise LeftToCandidateError("nvcc would detect the GPU")
        with self._lock:  # no other thread sets the architectures meanwhile
            self._building.key = key(original, args, kwargs, self._scratch)
        try:
            return original(*args, **kwargs)
        except RuntimeError as error:
            if isinstance(error.__cause__, subprocess.CalledProcessError) and is_lasting(str(error)):
                self._place().joinpath(REFUSED).write_text(str(error)[-_REFUSAL_CHARACTERS:], errors="replace")
            raise

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Patch torch's builder inside the ``with`` block. On a GPU slot, also end the build if it asks for a GPU."""
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
        place = self._place()
        shutil.copyfile(library, place / library.name)
        self._not_compiling()
        try:
            return self._import(name, path, is_python_module)
        except Exception as error:
            raise LeftToCandidateError("the library cannot be imported here") from error

    def _place(self) -> Path:
        """Return the directory for what comes of this thread's build."""
        place = self._scratch / MADE / self._building.key
        place.mkdir(parents=True, exist_ok=True)
        return place

    def _flags_for_architectures(self, *args: Any, **kwargs: Any) -> Any:
        # Set the variable only here: a kernel may set it itself if it is unset.
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
