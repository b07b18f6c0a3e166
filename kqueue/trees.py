"""Trees: the files of a repository or folder as one text, which the hosts of a fleet unpack in sealed processes.

A kernel or problem names a tree in its first line, ``# kqueue tree sha256:HASH``, after which the folder of the
imports can follow. So the hash of the source covers the tree. The text of a tree lists its files with their hashes
before their content. It is stored once, in the place of a problem's source. A second line, ``# kqueue build COMMAND``,
names the command that builds the tree's extensions.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
import shlex
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from kqueue.contract import BUILD_LINE, MAX_TESTS_BYTES, MAX_TREE_BYTES, MAX_TREE_FILES, TESTS_LINE, TREE_LINE
from kqueue.errors import ConfigError, InvalidRequest

#: Limit on the number of files of a repository's tests.
_MOST_FILES: Final = 15_000
#: Limit on the total size in bytes before compression. A larger repository hardly compresses below the second limit.
_MOST_BYTES: Final = 512 << 20
#: Folders that are not sent.
_LEFT_OUT: Final = frozenset({"__pycache__", "node_modules"})
#: Number of the largest files that a refusal names.
_NAMED: Final = 3


#: A folder, a revision, and the folder in it where imports begin.
_GIVEN: Final = re.compile(r"(.+?)(?:@([^@:]+))?(?::([^@:]+))?")


def find(folder: Path) -> Path:
    """Return the root of the repository that contains a folder, or the folder itself outside of repositories."""
    output = _git(folder.resolve(), "rev-parse", "--show-toplevel")
    return folder.resolve() if output is None else Path(os.fsdecode(output.rstrip(b"\n"))).resolve()


def packed_tests(root: Path) -> str:
    """Return the files of a repository as a text for its tests, without what Git ignores.

    A link to a file outside is replaced by that file. Broken links and links to folders outside are left out.
    """
    sizes = _sizes(root)
    _check_files(root, sizes, _MOST_FILES)
    text = TESTS_LINE + base64.encodebytes(_archive(root, sizes)[0]).decode()
    if len(text) > MAX_TESTS_BYTES:
        raise InvalidRequest(
            f"the files of {root}, compressed, have {len(text) / 2**20:.1f} MiB of text, of which at most"
            f" {MAX_TESTS_BYTES >> 20} can be sent: {_advice(sizes)}"
        )
    return text


class Tree(NamedTuple):
    """A packed tree. ``files`` are the paths of its files."""

    text: str
    files: frozenset[str]

    @property
    def name(self) -> str:
        """The tree's name: ``sha256:`` and the hash of its text."""
        return f"sha256:{hashlib.sha256(self.text.encode()).hexdigest()}"

    def line(self, root: str = "", build: Sequence[str] = ()) -> str:
        """Return the first lines of a source that names the tree.

        Its imports begin in the folder ``root``. The command ``build`` builds its extensions.
        """
        built = f"{BUILD_LINE} {shlex.join(build)}\n" if build else ""
        return f"{TREE_LINE.rstrip()} {self.name} {root}".rstrip() + f"\n{built}"


def pack(root: Path, shown: str = "") -> Tree:
    """Return the files of a folder as a tree, without what Git ignores. ``shown`` names the folder in errors.

    Raise InvalidRequest for a link out of the folder or an exceeded limit, and ConfigError for an unreadable file.
    """
    root, shown = root.resolve(), shown or str(root)
    sizes = _sizes(root)
    if not sizes:
        raise InvalidRequest(f"{shown} has no files to pack")
    _check_files(shown, sizes, MAX_TREE_FILES)
    for name in sizes:
        path = root / name
        if not str(name).isprintable():
            raise InvalidRequest(f"{str(name)!r} in {shown}: the name of a tree's file is printable text: rename it")
        if path.is_symlink() and not _is_inside(root, path):
            raise InvalidRequest(
                f"{name} in {shown} is a link to nothing or out of it: remove it, because a tree has no such link"
            )
    archive, lines = _archive(root, sizes)
    if len(archive) > MAX_TREE_BYTES:
        raise InvalidRequest(
            f"the files of {shown}, compressed, have {len(archive) / 2**20:.1f} MiB, of which at most"
            f" {MAX_TREE_BYTES >> 20} can be sent: {_advice(sizes)}"
        )
    return Tree(f"{TREE_LINE}{''.join(lines)}\n{base64.encodebytes(archive).decode()}", frozenset(map(str, sizes)))


def pack_given(given: str) -> tuple[Tree, str]:
    """Return the tree that ``DIR[@REV][:ROOT]`` names, and the folder in it where imports begin.

    Raise InvalidRequest if there is no such folder or revision, and errors as :func:`pack` does.
    """
    found = None if Path(given).is_dir() else _GIVEN.fullmatch(given)
    name, revision, root = found.groups("") if found else (given, "", "")
    if not (folder := Path(name).resolve()).is_dir():
        raise InvalidRequest(f"{given}: {name} is no folder: give DIR, DIR@REV, DIR:ROOT or DIR@REV:ROOT")
    if not revision:
        return pack(folder, given), root.strip("/")
    clone = Clone(folder)
    with tempfile.TemporaryDirectory(prefix="kqueue-tree-") as made:
        clone.unpack(clone.revision(revision), whole := Path(made, "tree"))
        if not (there := whole / folder.relative_to(clone.root)).is_dir():
            raise InvalidRequest(f"{given}: the revision {revision} has no such folder")
        return pack(there, given), root.strip("/")


class Clone:
    """A clone of a Git repository, whose revisions are packed without a change of its files or its index."""

    def __init__(self, folder: Path) -> None:
        """Find the repository that contains a folder. Raise InvalidRequest outside of repositories."""
        if _git(folder.resolve(), "rev-parse", "--git-dir") is None:
            raise InvalidRequest(f"{folder}: no Git repository: start in a clone")
        self.root = find(folder)

    def revision(self, name: str) -> str:
        """Return the hash of a commit. Raise InvalidRequest if the clone does not have it."""
        found = _run(self.root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
        if found.returncode:
            shallow = _git(self.root, "rev-parse", "--is-shallow-repository")
            advice = "fetch it" + (" (the clone is shallow: fetch-depth: 0)" if shallow == b"true\n" else "")
            raise InvalidRequest(f"the revision {name} is not in {self.root}: {advice}, or name another")
        return found.stdout.decode().strip()

    def committed(self, revision: str) -> str:
        """Return when a revision was committed, such as ``2026-11-29T10:12:13Z``."""
        seconds = _git(self.root, "show", "--no-patch", "--format=%ct", revision) or b"0"
        return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def uncommitted(self) -> list[str]:
        """Return the paths of changes that no revision contains."""
        output = _git(self.root, "status", "--porcelain", "-z", "--no-renames") or b""
        return [os.fsdecode(line[3:]) for line in output.split(b"\0") if line]

    def changed(self, base: str, head: str) -> frozenset[str]:
        """Return the paths of the files that differ between two revisions."""
        output = _git(self.root, "diff", "--name-only", "-z", "--no-renames", base, head) or b""
        return frozenset(os.fsdecode(name) for name in output.split(b"\0") if name)

    def unpack(self, revision: str, folder: Path) -> None:
        """Write the files of a revision to a folder."""
        index = {**os.environ, "GIT_INDEX_FILE": str(folder.with_suffix(".index").absolute())}
        for words in (("read-tree", revision), ("checkout-index", "--all", f"--prefix={folder.absolute()}/")):
            if (done := _run(self.root, *words, environment=index)).returncode:
                raise ConfigError(f"git {words[0]} of {revision}: {_complaint(done)}")
        folder.mkdir(exist_ok=True)


def _advice(sizes: dict[PurePosixPath, int]) -> str:
    largest = sorted(sizes, key=lambda name: -sizes[name])[:_NAMED]
    named = ", ".join(f"{name} ({sizes[name] / 2**20:.1f} MiB)" for name in largest)
    return f"the largest are {named}. Files that Git ignores are left out"


def _check_files(root: Path | str, sizes: dict[PurePosixPath, int], most: int) -> None:
    if len(sizes) > most:
        raise InvalidRequest(f"{root} has {len(sizes)} files, of which at most {most} can be sent: {_advice(sizes)}")
    if sum(sizes.values()) > _MOST_BYTES:
        raise InvalidRequest(f"the files of {root} have more than {_MOST_BYTES >> 20} MiB: {_advice(sizes)}")


def _sizes(root: Path) -> dict[PurePosixPath, int]:
    """Return the sizes in bytes of a folder's files and links, a link's target counted, by path."""
    sizes = dict[PurePosixPath, int]()
    for name in _files(root):
        path = root / name
        if path.is_file() or path.is_symlink():
            sizes[name] = path.stat().st_size if path.is_file() else path.lstat().st_size
    return sizes


def _is_inside(root: Path, link: Path) -> bool:
    """Return whether a link leads to something in a folder, by a relative path."""
    return link.exists() and link.resolve().is_relative_to(root) and not link.readlink().is_absolute()


def _archive(root: Path, files: Iterable[PurePosixPath]) -> tuple[bytes, list[str]]:
    """Return files of a folder as a reproducible archive, and a line with hash and path of each.

    A link to a file outside the folder is replaced by that file.
    """
    packed, lines = io.BytesIO(), list[str]()
    with tarfile.open(fileobj=packed, mode="w:xz", preset=1, format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(files):
            path = root / name
            link = path.is_symlink() and _is_inside(root, path)  # a link to itself cannot be followed
            if not link and not path.is_file():
                continue
            member = tarfile.TarInfo(str(name))
            # Some tests pack files into ZIP archives, which cannot store earlier dates than 1980.
            member.mtime = 1_000_000_000
            if link:
                data = str(path.readlink()).encode()
                member.type, member.linkname = tarfile.SYMTYPE, str(path.readlink())
                tar.addfile(member)
            else:
                try:
                    data = path.read_bytes()  # read once, because the size must match
                except OSError as error:
                    raise ConfigError(f"{error.filename or root} cannot be read: {error.strerror}") from None
                member.size, member.mode = len(data), 0o755 if path.stat().st_mode & 0o100 else 0o644
                tar.addfile(member, io.BytesIO(data))
            lines.append(f"{hashlib.sha256(data).hexdigest()} {name}\n")
    return packed.getvalue(), lines


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


def _run(folder: Path, *words: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["git", "-C", str(folder), *words], capture_output=True, stdin=subprocess.DEVNULL, check=False, env=environment
    )


def _complaint(done: subprocess.CompletedProcess[bytes]) -> str:
    return " ".join(done.stderr.decode(errors="replace").split())


def _git(folder: Path, *arguments: str) -> bytes | None:
    """Return Git's output for a folder, or None outside of repositories. Raise a ConfigError if Git fails in one."""
    try:
        done = _run(folder, *arguments)
    except OSError as error:
        why = f"git: {error.strerror}"
    else:
        if done.returncode == 0:
            return done.stdout
        why = _complaint(done)
    # Without Git's answer, ignored files such as credentials would be sent.
    for each in (folder, *folder.parents):
        if os.path.lexists(each / ".git"):
            raise ConfigError(
                f"{each} is a Git repository, and git does not say which of its files it ignores ({why}): repair it"
                f" until `git -C {each} status` works, or remove {each / '.git'} to send all files"
            )
    return None
