"""Libraries from torch's extension builder: compiled in the builder's process, imported by the candidate.

The builder is a process like the candidate, but without a GPU. It imports the kernel's source and saves each compiled
library under a key, which is a hash of the request to torch's builder. The fork server copies the libraries
(:mod:`workers.judge.sandbox.shelf`). The candidate makes the same request, computes the key, and imports the library.

Only compiler results of the builder count. Wherever a module would behave differently with a GPU,
:class:`LeftToCandidateError` ends the build, and the candidate compiles the rest.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Final, NoReturn

import torch

from workers.judge.candidate import headers
from workers.judge.candidate.compilers import LOCATED
from workers.judge.sandbox.shelf import MADE, REFUSED

#: Arguments of torch's builder that do not change the library. Sources are compared by content.
_INCIDENTAL: Final = frozenset({"build_directory", "verbose", "keep_intermediates", "sources"})
_ARCHITECTURES: Final = "TORCH_CUDA_ARCH_LIST"
#: Variables that add flags for nvcc.
_NVCC_FLAGS: Final = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
#: Variables that change the library. A kernel that detects the GPU without torch can set them differently.
_HEEDED: Final = (
    *(_ARCHITECTURES, *_NVCC_FLAGS, "NVCC_CCBIN", "CC", "CXX"),
    *("CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH"),
)


#: Signs of trouble on the host: a lack of memory, processes, files or space, and compilers that were killed or crashed.
_TROUBLE: Final = re.compile(
    r"memory|\bkilled\b|signal|terminated|internal (?:compiler )?error|segmentation|no space left|too many open files"
    r"|resource temporarily|cannot (?:allocate|fork)|vfork|posix_spawn|input/output error|stale file|timed? ?out"
    r"|disk quota|read-only file system",
    re.IGNORECASE,
)
#: Number of characters that are kept from the end of a compiler's output.
_REFUSAL_CHARACTERS: Final = 64 << 10


def is_lasting(output: str) -> bool:
    """Return whether a compiler's output shows an error of the source, which would occur again.

    The output is not trusted. It only decides whether the source is compiled again.
    """
    return LOCATED.search(output) is not None and _TROUBLE.search(output) is None


class LeftToCandidateError(BaseException):
    """Ends the build. It is a ``BaseException``, because kernels catch ``Exception`` to use a fallback."""


def builder() -> Any:
    """Return torch's extension builder. Its private functions are used, because it has no public interface."""
    return importlib.import_module("torch.utils.cpp_extension")


def key(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], scratch: Path) -> str:
    """Return a library's key: a hash of its name, flags, compiler variables and source contents.

    Args:
        original, args, kwargs: torch's ``_jit_compile`` and its arguments.
        scratch: the process's own directory, which is left out of the hash because builder and candidate differ in it.

    Raises:
        OSError: a source cannot be read.
    """
    asked = inspect.signature(original).bind(*args, **kwargs).arguments
    request = repr(sorted((name, repr(value)) for name, value in asked.items() if name not in _INCIDENTAL))
    request += repr([os.environ.get(name) for name in _HEEDED])
    digest = hashlib.sha256(request.replace(str(scratch), "").encode())
    for source in map(Path, asked["sources"]):
        content = source.read_bytes()
        digest.update(f"{source.name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def prebuilt(
    shelf: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], scratch: Path
) -> tuple[str, str, bool] | None:
    """Find the compiled library for a request to torch's builder in the directory ``shelf``, if that is not empty.

    Return arguments for torch's ``_import_module_from_library``, or None if there is no such library.

    Raises:
        RuntimeError: the same request failed to compile in the builder.
    """
    if not shelf:
        return None
    asked = inspect.signature(original).bind(*args, **kwargs).arguments
    folder = Path(shelf, key(original, args, kwargs, scratch))
    if (refusal := folder / REFUSED).exists():
        raise RuntimeError(refusal.read_text(errors="replace"))
    library = next(folder.glob("*.so"), None)
    if library is None or asked["is_standalone"]:
        return None
    return library.stem, str(folder), asked["is_python_module"]


def drop_stale_lock(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Remove the lock of a build directory if no process has it open. torch would wait for its removal forever.

    torch keeps its lock open while it builds.
    """
    lock = Path(inspect.signature(original).bind(*args, **kwargs).arguments["build_directory"], "lock").resolve()
    if not lock.exists():
        return
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # another user's process, or one that has ended
            if descriptor.readlink() == lock:
                return
    print(f"kqueue removed {lock}, a lock of torch.utils.cpp_extension that no process holds", flush=True)  # noqa: T201
    lock.unlink(missing_ok=True)


def note_lines() -> None:
    """Make nvcc record source lines from now on. This does not change the generated instructions."""
    given = os.environ.get(_NVCC_FLAGS[1], "").split()
    if "-lineinfo" not in given:
        os.environ[_NVCC_FLAGS[1]] = " ".join([*given, "-lineinfo"])


def use_quick_compilers() -> None:
    """Make torch's builder use fewer headers from now on, in all threads.

    Precompiled headers are disabled, because their folder is read-only here and an extension does not need them.
    """
    torch_builder = builder()
    run, precompile = torch_builder._run_ninja_build, torch_builder._check_and_build_extension_h_precompiler_headers

    @functools.wraps(run)
    def run_with_few(*args: Any, **kwargs: Any) -> Any:
        return headers.try_fewer(run, *args, **kwargs)

    @functools.wraps(precompile)
    def precompile_nothing(*_: Any, **__: Any) -> None:
        pass

    torch_builder._run_ninja_build = run_with_few
    torch_builder._check_and_build_extension_h_precompiler_headers = precompile_nothing


class Keeper:
    """Stores the libraries that torch's builder compiles, in the builder's process."""

    def __init__(self, scratch: Path, architectures: str, not_compiling: Callable[[], None]) -> None:
        """Store the libraries below the directory ``scratch``, and call ``not_compiling`` before their own code runs.

        ``architectures`` are nvcc's targets if the kernel names none, or an empty string on a CPU slot.
        """
        self._scratch = scratch
        self._architectures = architectures
        self._not_compiling = not_compiling
        self._torch = builder()
        self._import = self._torch._import_module_from_library
        self._arch_flags = self._torch._get_cuda_arch_flags
        #: Key of the library that each thread builds, because kernels can build in several threads.
        self._building = threading.local()
        self._lock = threading.Lock()

    def build(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Build a library with torch. If that fails, keep the compiler's error."""
        asked = inspect.signature(original).bind(*args, **kwargs).arguments
        nvcc_flags = [*(asked.get("extra_cuda_cflags") or ()), *(os.environ.get(name, "") for name in _NVCC_FLAGS)]
        if self._architectures and any("native" in flag for flag in nvcc_flags):
            raise LeftToCandidateError("nvcc would detect the GPU")
        with self._lock:  # other threads set the architectures under this lock
            self._building.key = key(original, args, kwargs, self._scratch)
        try:
            return original(*args, **kwargs)
        except RuntimeError as error:
            if isinstance(error.__cause__, subprocess.CalledProcessError) and is_lasting(str(error)):
                self._folder().joinpath(REFUSED).write_text(str(error)[-_REFUSAL_CHARACTERS:], errors="replace")
            raise

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Patch torch's builder inside the ``with`` block. On a GPU slot, end the build if it asks for a GPU."""
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
        shutil.copyfile(library, self._folder() / library.name)
        self._not_compiling()
        try:
            return self._import(name, path, is_python_module)
        except Exception as error:
            raise LeftToCandidateError("the library cannot be imported here") from error

    def _folder(self) -> Path:
        """Return the directory for the results of this thread's build."""
        folder = self._scratch / MADE / self._building.key
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _flags_for_architectures(self, *args: Any, **kwargs: Any) -> Any:
        # The variable is set only during this call, because a kernel can set it itself if it is unset.
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
