"""Copies compiled libraries from a builder to its candidate.

The builder writes them as ``made/<key>/<module>.so`` in its own directory, or ``made/<key>/refused``, what a compiler
has said against a request. When all of its processes have ended, they
are copied to a directory of the fleet's, which the candidate can read but not write.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Generator, Iterable
from itertools import islice
from pathlib import Path
from typing import Final

#: The folder in its directory in which a builder puts its libraries.
MADE: Final = "made"
#: The most libraries and bytes to copy: the candidate waits for the copy.
_MOST: Final = 64
_BYTES: Final = 256 << 20
_KEY: Final = re.compile(r"[0-9a-f]{64}")
#: The file that says why there is no library.
REFUSED: Final = "refused"
_NAME: Final = re.compile(rf"[^./][^/]*\.so|{REFUSED}")
#: Do not follow links or wait for pipes.
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def make(shelf: Path) -> None:
    """Create the directory, readable by all and writable by the caller. The judge may have done so before."""
    shelf.mkdir(exist_ok=True)
    shelf.chmod(0o755)


def fill(shelf: Path, files: Iterable[tuple[str, str, bytes]]) -> None:
    """Create the directory, and put what a builder has made before there: all of it, or nothing.

    Args:
        shelf: the directory.
        files: key, name and content of each library or refusal.

    Raises:
        OSError: the host has no room for them.
        ValueError: a key or name is no library's.
    """
    make(shelf)
    try:
        for key, name, content in files:
            _put(shelf, key, name, content)
    except (OSError, ValueError):
        _clear(shelf)
        raise


def _put(shelf: Path, key: str, name: str, content: bytes) -> None:
    if not (_KEY.fullmatch(key) and _NAME.fullmatch(name)):
        raise ValueError(f"{key}/{name} is no library")
    place = shelf / key
    place.mkdir()
    place.chmod(0o755)
    with (place / name).open("xb") as stream:
        os.fchmod(stream.fileno(), 0o644)
        stream.write(content)


def read(shelf: Path) -> list[tuple[str, str, bytes]]:
    """Return what is there, as :func:`fill` takes it."""
    return [(path.parent.name, path.name, path.read_bytes()) for path in files(shelf)]


def _clear(shelf: Path) -> None:
    """Remove what is there, as far as it can be. The directory stays: a candidate may have it in its reach."""
    for place in shelf.iterdir():
        shutil.rmtree(place, ignore_errors=True)


def files(shelf: Path) -> list[Path]:
    """Return what is there, libraries and refusals, each as ``<key>/<name>`` below it."""
    return sorted(shelf.glob("*/*"))


def take(scratch: Path, shelf: Path, owner: int, most: int) -> None:
    """Copy the libraries of an ended builder. The candidate compiles again whatever is left out.

    Only regular files that the builder owns and that have one name are copied: a hard link could open another user's
    file to the candidate.

    Args:
        scratch: the builder's directory.
        shelf: the directory from :func:`make`.
        owner: the builder's uid.
        most: most bytes in total.
    """
    left = min(most, _BYTES)
    with contextlib.suppress(OSError), _directory(scratch / MADE) as made, os.scandir(made) as places:
        for place in islice(places, _MOST):
            if not _KEY.fullmatch(place.name):
                continue
            with contextlib.suppress(OSError), _directory(place.name, made) as directory:
                with os.scandir(directory) as entries:
                    name = next((entry.name for entry in islice(entries, 1)), "")
                if _NAME.fullmatch(name):
                    left -= _copy(name, directory, shelf / place.name, owner, left)


@contextlib.contextmanager
def _directory(path: Path | str, within: int | None = None) -> Generator[int]:
    descriptor = os.open(path, _READ | os.O_DIRECTORY, dir_fd=within)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _copy(name: str, directory: int, place: Path, owner: int, most: int) -> int:
    """Copy one library completely or not at all. Return the number of bytes copied."""
    source = os.open(name, _READ, dir_fd=directory)
    part = place.with_name("part")
    try:
        found = os.fstat(source)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_uid != owner or found.st_size > most:
            return 0
        with open(part, "xb", opener=_only_ours) as target:
            os.fchmod(target.fileno(), 0o644)
            copied = 0
            while copied < found.st_size:
                sent = os.sendfile(target.fileno(), source, copied, found.st_size - copied)
                if sent == 0:
                    return 0
                copied += sent
        place.mkdir()
        place.chmod(0o755)
        part.rename(place / name)
        return copied
    finally:
        part.unlink(missing_ok=True)
        os.close(source)


def _only_ours(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
