"""The files of a repository that travel to the hosts of a fleet."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from kqueue.contract import MAX_TESTS_BYTES
from kqueue.errors import ConfigError
from workers.judge.candidate.archive import pack

#: The most files: the file system of a sealed process holds 20,000.
_MOST_FILES: Final = 15_000
#: The most that is packed, in bytes: what is above does not become small enough.
_MOST_BYTES: Final = 512 << 20
#: Folders that no repository is made of.
_LEFT_OUT: Final = frozenset({"__pycache__", "node_modules"})
#: How many of the largest files a refusal names.
_NAMED: Final = 3


def find(folder: Path) -> Path:
    """Return the folder of the repository that a folder lies in; the folder itself where that is in none.

    Raises:
        ConfigError: it lies in one that Git does not read.
    """
    told = _git(folder.resolve(), "rev-parse", "--show-toplevel")
    return folder.resolve() if told is None else Path(os.fsdecode(told.rstrip(b"\n"))).resolve()


def packed(root: Path) -> str:
    """Return the files of a repository as a text, without what Git ignores.

    Raises:
        ConfigError: there are too many, they are too large, one cannot be read, or Git does not say what it ignores.
    """
    sizes = {name: size for name in _files(root) if (size := _size(root / name)) is not None}
    largest = sorted(sizes, key=lambda name: -sizes[name])[:_NAMED]
    named = ", ".join(f"{name} ({sizes[name] / 2**20:.1f} MiB)" for name in largest)
    advice = f"the largest are {named}; what Git ignores is left out"
    if len(sizes) > _MOST_FILES:
        raise ConfigError(f"{root} has {len(sizes)} files, of which at most {_MOST_FILES} can be sent: {advice}")
    if sum(sizes.values()) > _MOST_BYTES:
        raise ConfigError(f"the files of {root} have more than {_MOST_BYTES >> 20} MiB: {advice}")
    try:
        text = pack(root, sizes)
    except OSError as error:
        raise ConfigError(f"{error.filename or root} cannot be read: {error.strerror}") from None
    if len(text) > MAX_TESTS_BYTES:
        raise ConfigError(
            f"the files of {root}, compressed, have {len(text) / 2**20:.1f} MiB of text, of which at most"
            f" {MAX_TESTS_BYTES >> 20} can be sent: {advice}"
        )
    return text


def _size(path: Path) -> int | None:
    """Return the size of a file, or of the one that a link leads to; None for what is neither file nor link."""
    if path.is_file():
        return path.stat().st_size
    return path.lstat().st_size if path.is_symlink() else None


def _files(root: Path) -> Iterator[PurePosixPath]:
    """Yield the paths of files and links in a folder: those that Git does not ignore where it is a repository's."""
    told = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if told is None:
        yield from _walked(root)
        return
    for name in dict.fromkeys(os.fsdecode(name) for name in told.split(b"\0") if name):
        path = root / name
        if path.is_symlink() or not path.is_dir():
            yield PurePosixPath(name)
        elif os.path.lexists(path / ".git"):  # a repository within this one, which has its own word on its files
            yield from (PurePosixPath(name, inner) for inner in _files(path))


def _walked(root: Path) -> Iterator[PurePosixPath]:
    for where, folders, files in os.walk(root):
        here = PurePosixPath(os.path.relpath(where, root))
        yield from (here / file for file in files)
        left, folders[:] = folders[:], []
        for each in left:
            path = Path(where, each)
            if each in _LEFT_OUT or each[0] == "." or (path / "pyvenv.cfg").exists():
                continue
            if path.is_symlink():
                yield here / each
            elif os.path.lexists(path / ".git"):
                yield from (here / each / inner for inner in _files(path))
            else:
                folders.append(each)


def _git(folder: Path, *words: str) -> bytes | None:
    """Return what Git says of a folder; None where that lies in no repository.

    Raises:
        ConfigError: it lies in one, and Git says nothing. What it ignores, such as credentials, would travel.
    """
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, stdin=subprocess.DEVNULL, check=False
        )
    except OSError as error:
        why = f"git: {error.strerror}"
    else:
        if done.returncode == 0:
            return done.stdout
        why = " ".join(done.stderr.decode(errors="replace").split())
    for each in (folder, *folder.parents):
        if os.path.lexists(each / ".git"):
            raise ConfigError(
                f"{each} is a Git repository, and git does not say which of its files it ignores ({why}): see to it"
                f" that `git -C {each} status` works, or remove {each / '.git'}, and all files are sent"
            )
    return None
