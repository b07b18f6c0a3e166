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
    """Return the folder of the repository that a folder lies in; the folder itself where that is in none."""
    told = _git(folder, "rev-parse", "--show-toplevel")
    return Path(os.fsdecode(told.rstrip(b"\n"))).resolve() if told else folder.resolve()


def packed(root: Path) -> str:
    """Return the files of a repository as a text, without what Git ignores.

    Raises:
        ConfigError: there are too many, they are too large, or one cannot be read.
    """
    sizes = {name: (root / name).stat().st_size for name in _files(root) if (root / name).is_file()}
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


def _files(root: Path) -> Iterator[PurePosixPath]:
    told = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = [os.fsdecode(name) for name in told.split(b"\0") if name] if told else ["."]
    for name in dict.fromkeys(names):
        path = root / name
        if not path.is_dir() or path.is_symlink():
            yield PurePosixPath(name)
            continue
        # A repository within this one, or all of it where there is no Git.
        for folder, folders, files in os.walk(path):
            folders[:] = [
                each
                for each in folders
                if each not in _LEFT_OUT and each[0] != "." and not Path(folder, each, "pyvenv.cfg").exists()
            ]
            for file in files:
                yield PurePosixPath(os.path.relpath(Path(folder, file), root))


def _git(folder: Path, *words: str) -> bytes:
    """Return what Git says; nothing where it is not there, or knows of no repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, stdin=subprocess.DEVNULL, check=False
        )
    except OSError:
        return b""
    return done.stdout if done.returncode == 0 else b""
