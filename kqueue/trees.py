"""The files of a repository that are sent to the hosts of a fleet."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from kqueue.contract import MAX_TESTS_BYTES
from kqueue.errors import ConfigError
from workers.judge.candidate.archive import pack

#: Limit on the number of files. The file system of a sealed process holds 20,000.
_MOST_FILES: Final = 15_000
#: Limit on the total size in bytes before compression. A larger repository hardly compresses below the second limit.
_MOST_BYTES: Final = 512 << 20
#: Folders that are not sent.
_LEFT_OUT: Final = frozenset({"__pycache__", "node_modules"})
#: Number of the largest files that a refusal names.
_NAMED: Final = 3


def find(folder: Path) -> Path:
    """Return the root of the repository that contains a folder, or the folder itself outside of repositories."""
    output = _git(folder.resolve(), "rev-parse", "--show-toplevel")
    return folder.resolve() if output is None else Path(os.fsdecode(output.rstrip(b"\n"))).resolve()


def packed(root: Path) -> str:
    """Return the files of a repository as a text, without what Git ignores."""
    sizes = {name: size for name in _files(root) if (size := _size(root / name)) is not None}
    largest = sorted(sizes, key=lambda name: -sizes[name])[:_NAMED]
    named = ", ".join(f"{name} ({sizes[name] / 2**20:.1f} MiB)" for name in largest)
    advice = f"the largest are {named}. Files that Git ignores are left out"
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
    """Return the size of a file, or of a link's target. Return None for other objects."""
    if path.is_file():
        return path.stat().st_size
    return path.lstat().st_size if path.is_symlink() else None


def _files(root: Path) -> Iterator[PurePosixPath]:
    """Yield the paths of files and links in a folder, without files that Git ignores if it is in a repository."""
    output = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if output is None:
        yield from _walked(root)
        return
    for name in dict.fromkeys(os.fsdecode(name) for name in output.split(b"\0") if name):
        path = root / name
        if path.is_symlink() or not path.is_dir():
            yield PurePosixPath(name)
        elif os.path.lexists(path / ".git"):  # a nested repository, which has its own list of ignored files
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


def _git(folder: Path, *arguments: str) -> bytes | None:
    """Return Git's output for a folder, or None outside of repositories. Raise a ConfigError if Git fails in one."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, stdin=subprocess.DEVNULL, check=False
        )
    except OSError as error:
        why = f"git: {error.strerror}"
    else:
        if done.returncode == 0:
            return done.stdout
        why = " ".join(done.stderr.decode(errors="replace").split())
    # Without Git's answer, ignored files such as credentials would be sent.
    for each in (folder, *folder.parents):
        if os.path.lexists(each / ".git"):
            raise ConfigError(
                f"{each} is a Git repository, and git does not say which of its files it ignores ({why}): repair it"
                f" until `git -C {each} status` works, or remove {each / '.git'} to send all files"
            )
    return None
