"""The libraries by which Triton launches kernels, compiled once for each sequence of argument types.

Triton up to 3.6 compiles such a library in every process, in 0.2 seconds; later ones have one for all kernels. Its
source depends on the types of the kernel's arguments and on nothing else. So a candidate notes the types. When it has
ended, the fork server has Triton write the source from these types, and compiles it for later candidates. Of what the
candidate says only names of types are used, and only those that Triton has.
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

#: The most libraries that are kept, sequences that wait, sequences that one candidate may name, and types in one.
_MOST: Final = 32
_MOST_WAITING: Final = 16
_MOST_NAMED: Final = 8
_MOST_TYPES: Final = 64
_NOTE_BYTES: Final = 64 << 10
#: The most sequences that are remembered as tried.
_MOST_TRIED: Final = 4096
#: Types of Triton's that are no pointers, and the one that stands for all pointers: launching does not tell them apart.
_SCALARS: Final = frozenset(
    ("constexpr", "i1", "i8", "i16", "i32", "i64", "u1", "u8", "u16", "u32", "u64", "fp16", "bf16", "fp32", "fp64")
)
_POINTER: Final = re.compile(r"\*[a-z0-9]{1,16}")
_ANY_POINTER: Final = "*i8"
#: How much less than others the compiler may have of the CPU.
_NICE: Final = 10
_ALL_DESCRIPTORS: Final = 1 << 20

_Types = tuple[str, ...]


class Launchers:
    """What candidates find in their caches: the driver's library, and those that launch kernels."""

    def __init__(self, files: dict[str, bytes]) -> None:
        """Begin with files by their places in a cache (:func:`workers.judge.forkserver.prewarm.prepare`)."""
        self._first = files
        self._made: dict[_Types, dict[str, bytes]] = {}
        self._waiting: deque[_Types] = deque(maxlen=_MOST_WAITING)
        self._tried: set[_Types] = set()
        self._compiler: tuple[int, _Types, str] | None = None
        self._are_needed = bool(files) and hasattr(_driver(), "make_launcher")

    @property
    def files(self) -> dict[str, bytes]:
        """The files, by their places in a cache."""
        return self._first | {name: content for made in self._made.values() for name, content in made.items()}

    @property
    def pids(self) -> set[int]:
        """The processes that compile."""
        return set() if self._compiler is None else {self._compiler[0]}

    def learn(self, note: Path, owner: int) -> None:
        """Compile what a candidate that has ended would have liked to find.

        Args:
            note: where it has noted types (:data:`workers.judge.candidate.harness.LAUNCHED`).
            owner: its uid.
        """
        for types in named(_read(note, owner)):
            if types in self._made:
                self._made[types] = self._made.pop(types)  # the one that was used last goes last
            elif types not in self._tried and self._are_needed:
                if len(self._tried) >= _MOST_TRIED:
                    self._tried.clear()
                self._tried.add(types)
                self._waiting.append(types)
        self.look()

    def look(self) -> None:
        """Take what a compiler has made, and begin with the next. To be called when a child has ended.

        Where the host has no room or no process for it, candidates compile for themselves.
        """
        if self._compiler is not None:
            pid, types, cache = self._compiler
            if not os.waitpid(pid, os.WNOHANG)[0]:
                return
            self._compiler = None
            with contextlib.suppress(OSError):
                self._take(types, Path(cache))
            shutil.rmtree(cache, ignore_errors=True)
        if self._waiting:
            with contextlib.suppress(OSError):
                self._begin(self._waiting.popleft())

    def _take(self, types: _Types, cache: Path) -> None:
        made = {str(path.relative_to(cache)): path.read_bytes() for path in cache.rglob("*.so")}
        if made:
            self._made[types] = made
        while len(self._made) > _MOST:
            forgotten = next(iter(self._made))
            del self._made[forgotten]
            self._tried.discard(forgotten)

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


def named(told: Any) -> list[_Types]:
    """Return the sequences of types in what a candidate has noted, whatever that is."""
    if not isinstance(told, list):
        return []
    sequences: list[_Types] = []
    for sequence in cast("list[Any]", told)[:_MOST_NAMED]:
        if not isinstance(sequence, list) or len(cast("list[Any]", sequence)) > _MOST_TYPES:
            continue
        types = [_known(name) for name in cast("list[Any]", sequence)]
        if all(types):
            sequences.append(tuple(types))
    return sequences


def _known(name: Any) -> str:
    if not isinstance(name, str):
        return ""
    return _ANY_POINTER if _POINTER.fullmatch(name) else name if name in _SCALARS else ""


def _read(note: Path, owner: int) -> Any:
    """Return what a candidate has noted; None if that cannot be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        # Do not follow links or wait for pipes.
        descriptor = os.open(note, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if stat.S_ISREG(found.st_mode) and found.st_uid == owner and found.st_nlink == 1:
                return json.loads(file.read(_NOTE_BYTES))
    return None


def source(types: _Types) -> str:
    """Return the source of the library that launches kernels with arguments of these types."""
    return _driver().make_launcher({}, dict(enumerate(types)), None)


def _driver() -> Any:
    return importlib.import_module("triton.backends.nvidia.driver")


def _compile(types: _Types, cache: str) -> NoReturn:
    """In the child: compile into a cache, as Triton does when it launches a kernel; or fail."""
    try:
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        os.closerange(3, _ALL_DESCRIPTORS)  # others wait for some of them to be closed
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
