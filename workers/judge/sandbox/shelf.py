"""The transfer of compiled libraries from a builder to its candidate, or to the reference.

The builder writes a library to ``made/<key>/<module>.so`` in its own directory, a compiler's error to
``made/<key>/refused``, or the files that the build of a tree wrote to ``made/<hash of the tree>/tree.tar``. When all
of its processes have ended, the files are copied to a directory of the fleet, which the candidate can read but not
write.
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

#: Folder for libraries in a builder's directory.
MADE: Final = "made"
#: Limits in libraries and bytes of a copy, because the candidate waits for it.
_MOST: Final = 64
BYTES: Final = 256 << 20
_KEY: Final = re.compile(r"[0-9a-f]{64}")
#: File with a compiler's error, in the place of a library.
REFUSED: Final = "refused"
#: Archive with the files that the build of a tree wrote.
TREE: Final = "tree.tar"
_NAME: Final = re.compile(rf"[^./][^/]*\.so|{REFUSED}|{re.escape(TREE)}")
#: Flags that do not follow links or wait for pipes.
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def make(shelf: Path) -> None:
    """Create the directory, readable by all and writable by the caller. The judge can have created it before."""
    shelf.mkdir(exist_ok=True)
    shelf.chmod(0o755)


def fill(shelf: Path, files: Iterable[tuple[str, str, bytes]]) -> None:
    """Create the directory and write an earlier build's files to it, completely or not at all.

    ``files`` has the key, name and content of each library or compiler error. Raise ValueError if a key or a name has
    the wrong form.
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
        raise ValueError(f"{key}/{name} is not a library")
    folder = shelf / key
    folder.mkdir()
    folder.chmod(0o755)
    with (folder / name).open("xb") as stream:
        os.fchmod(stream.fileno(), 0o644)
        stream.write(content)


def read(shelf: Path) -> list[tuple[str, str, bytes]]:
    """Return the files of the directory in the form for :func:`fill`."""
    return [(path.parent.name, path.name, path.read_bytes()) for path in files(shelf)]


def _clear(shelf: Path) -> None:
    """Remove the files if possible. The directory stays, because a candidate's seal can refer to it."""
    for folder in shelf.iterdir():
        shutil.rmtree(folder, ignore_errors=True)


def files(shelf: Path) -> list[Path]:
    """Return the libraries and compiler errors, each as ``<key>/<name>`` below the directory."""
    return sorted(shelf.glob("*/*"))


def take(scratch: Path, shelf: Path, owner: int, most: int) -> None:
    """Copy the libraries of an ended builder of uid ``owner``, up to ``most`` bytes in total.

    The candidate compiles every library that is not copied. Only regular files that the builder owns and that have one
    name are copied, because a hard link could expose another user's file to the candidate.
    """
    left = min(most, BYTES)
    with contextlib.suppress(OSError), _directory(scratch / MADE) as made, os.scandir(made) as folders:
        for folder in islice(folders, _MOST):
            if not _KEY.fullmatch(folder.name):
                continue
            with contextlib.suppress(OSError), _directory(folder.name, made) as directory:
                with os.scandir(directory) as entries:
                    name = next((entry.name for entry in islice(entries, 1)), "")
                if _NAME.fullmatch(name):
                    left -= _copy(name, directory, shelf / folder.name, owner, left)


@contextlib.contextmanager
def _directory(path: Path | str, within: int | None = None) -> Generator[int]:
    descriptor = os.open(path, _READ | os.O_DIRECTORY, dir_fd=within)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _copy(name: str, directory: int, folder: Path, owner: int, most: int) -> int:
    """Copy one library completely or not at all. Return the number of bytes copied."""
    source = os.open(name, _READ, dir_fd=directory)
    part = folder.with_name("part")
    try:
        status = os.fstat(source)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_uid != owner or status.st_size > most:
            return 0
        with open(part, "xb", opener=_only_ours) as target:
            os.fchmod(target.fileno(), 0o644)
            copied = 0
            while copied < status.st_size:
                sent = os.sendfile(target.fileno(), source, copied, status.st_size - copied)
                if sent == 0:
                    return 0
                copied += sent
        folder.mkdir()
        folder.chmod(0o755)
        part.rename(folder / name)
        return copied
    finally:
        part.unlink(missing_ok=True)
        os.close(source)


def _only_ours(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
