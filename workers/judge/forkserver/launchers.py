"""The launcher libraries with which Triton launches kernels, compiled once for each sequence of argument types.

Triton up to 3.6 compiles such a library in every process, which takes 0.2 seconds. Later versions have one launcher for
all kernels. The source depends only on the types of the kernel's arguments. A candidate writes these types to a file.
After its end, the fork server generates the source from the types by Triton, and compiles it for later candidates. It
uses only type names from the candidate's file, and only those that Triton defines.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import stat
import tempfile
from collections import deque
from pathlib import Path
from typing import Any, Final, NoReturn, cast

from workers.judge.forkserver.prewarm import cached_in
from workers.judge.host import linux

#: Maximum number of stored libraries.
_MOST: Final = 32
#: Maximum number of sequences that wait for compilation.
_MOST_WAITING: Final = 16
#: Maximum number of sequences that one candidate can request.
_MOST_NAMED: Final = 8
#: Maximum number of types in a sequence.
_MOST_TYPES: Final = 64
#: Maximum number of bytes read from a candidate's file.
_NOTE_BYTES: Final = 64 << 10
#: Maximum number of sequences that are remembered as tried.
_MOST_TRIED: Final = 4096
#: Triton's types other than pointers.
_SCALARS: Final = frozenset(
    ("constexpr", "i1", "i8", "i16", "i32", "i64", "u1", "u8", "u16", "u32", "u64", "fp16", "bf16", "fp32", "fp64")
)
_POINTER: Final = re.compile(r"\*[a-z0-9]{1,16}")
#: Type that replaces every pointer type, because a launcher is the same for all of them.
_ANY_POINTER: Final = "*i8"
#: Nice value of the compiler process, so that it does not delay other processes.
_NICE: Final = 10
_ALL_DESCRIPTORS: Final = 1 << 20

_Types = tuple[str, ...]


class Launchers:
    """The files for candidates' caches: the driver library and the launcher libraries."""

    def __init__(self, files: dict[str, bytes]) -> None:
        """Start with files by their paths in a cache (:func:`workers.judge.forkserver.prewarm.prepare`)."""
        self._first = files
        self._compiled: dict[_Types, dict[str, bytes]] = {}
        self._waiting: deque[_Types] = deque(maxlen=_MOST_WAITING)
        self._tried: set[_Types] = set()
        self._compiler: tuple[int, _Types, str] | None = None
        self._are_needed = bool(files) and hasattr(_driver(), "make_launcher")

    @property
    def files(self) -> dict[str, bytes]:
        """The files by their paths in a cache."""
        return self._first | {name: content for files in self._compiled.values() for name, content in files.items()}

    @property
    def pids(self) -> set[int]:
        """The compiler processes."""
        return set() if self._compiler is None else {self._compiler[0]}

    def learn(self, note: Path, owner: int) -> None:
        """Compile the launchers that an ended candidate needed.

        ``note`` is the candidate's file of types (:data:`workers.judge.candidate.harness.LAUNCHED`).
        """
        for types in named(_read(note, owner)):
            if types in self._compiled:
                self._compiled[types] = self._compiled.pop(types)  # moves the last used one to the end
            elif types not in self._tried and self._are_needed:
                if len(self._tried) >= _MOST_TRIED:
                    self._tried.clear()
                self._tried.add(types)
                self._waiting.append(types)
        self.look()

    def look(self) -> None:
        """Collect the result of a compiler that has exited, and start the next. Call this when a child has exited.

        If the host has no disk space or cannot fork, candidates compile the launcher themselves.
        """
        if self._compiler is not None:
            pid, types, cache = self._compiler
            if not os.waitpid(pid, os.WNOHANG)[0]:
                return
            self._compiler = None
            with contextlib.suppress(OSError):
                self._collect(types, Path(cache))
            shutil.rmtree(cache, ignore_errors=True)
        if self._waiting:
            with contextlib.suppress(OSError):
                self._begin(self._waiting.popleft())

    def _collect(self, types: _Types, cache: Path) -> None:
        files = {str(path.relative_to(cache)): path.read_bytes() for path in cache.rglob("*.so")}
        if files:
            self._compiled[types] = files
        while len(self._compiled) > _MOST:
            oldest = next(iter(self._compiled))
            del self._compiled[oldest]
            self._tried.discard(oldest)

    def _begin(self, types: _Types) -> None:
        cache = tempfile.mkdtemp()
        try:
            pid = os.fork()
        except OSError:
            shutil.rmtree(cache, ignore_errors=True)
            raise
        if pid == 0:
            _compile(types, cache)
        self._compiler = pid, types, cache


def named(note: Any) -> list[_Types]:
    """Return the valid sequences of types in the untrusted content of a candidate's file."""
    if not isinstance(note, list):
        return []
    sequences: list[_Types] = []
    for sequence in cast("list[Any]", note)[:_MOST_NAMED]:
        if not isinstance(sequence, list) or len(cast("list[Any]", sequence)) > _MOST_TYPES:
            continue
        types = [_type_of(name) for name in cast("list[Any]", sequence)]
        if all(types):
            sequences.append(tuple(types))
    return sequences


def _type_of(name: Any) -> str:
    """Return the type with a name as a launcher distinguishes it, or an empty text for an invalid name."""
    if not isinstance(name, str):
        return ""
    return _ANY_POINTER if _POINTER.fullmatch(name) else name if name in _SCALARS else ""


def _read(note: Path, owner: int) -> Any:
    """Return the content of a candidate's file, or None if it cannot be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        # Do not follow links or wait for pipes.
        descriptor = os.open(note, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and status.st_uid == owner and status.st_nlink == 1:
                return json.loads(file.read(_NOTE_BYTES))
    return None


def source(types: _Types) -> str:
    """Return the source of the launcher library for arguments of these types."""
    return _driver().make_launcher({}, dict(enumerate(types)), None)


def _driver() -> Any:
    return importlib.import_module("triton.backends.nvidia.driver")


def _compile(types: _Types, cache: str) -> NoReturn:
    """Compile into a cache in the child process, in the same way as Triton at a launch, and exit."""
    try:
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        devnull = os.open(os.devnull, os.O_RDWR)
        os.dup2(devnull, 1)
        os.dup2(devnull, 2)
        os.closerange(3, _ALL_DESCRIPTORS)  # other processes wait until some of these are closed
        os.nice(_NICE)
        driver = _driver()
        build: Any = importlib.import_module("triton.runtime.build")
        with cached_in(cache):
            build.compile_module_from_src(
                src=source(types),
                name="__triton_launcher",
                library_dirs=driver.library_dirs(),
                include_dirs=driver.include_dirs,
                libraries=driver.libraries,
            )
    except Exception:  # noqa: BLE001, S110 -- candidates then compile it themselves
        pass
    finally:
        linux.leave(0)
