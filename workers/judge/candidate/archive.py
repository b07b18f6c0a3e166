"""The files of :mod:`kqueue.trees` in a sealed process: unpacked, built, and on the import path."""

from __future__ import annotations

import base64
import binascii
import hashlib
import importlib.abc
import importlib.machinery
import io
import lzma
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any, Final

from kqueue.contract import LOG_TAIL_BYTES, MAX_TREE_FILES, TESTS_LINE, TREE_LINE, named_tree
from workers.judge.channel.orders import Job
from workers.judge.sandbox import shelf

#: Name of a tree's folder, next to the source that names it.
_FOLDER: Final = "tree"
#: Modules that no tree replaces: the standard library, the judge's own packages, and packages that it has loaded.
_KEPT: Final = sys.stdlib_module_names | {"kqueue", "migrations", "numpy", "torch", "triton", "workers"}
#: Endings of files that only a build needs.
_INTERMEDIATE: Final = (".o", ".obj", ".a")


class NotAnArchive(Exception):
    """The text contains no repository."""


def unpack(text: str, folder: Path) -> None:
    """Unpack a text into a new folder. Runs in a sealed process, because the text is not trusted.

    Raises:
        NotAnArchive: the text contains no files, or has paths outside the folder.
        OSError: the disk is full, or the folder cannot be written.
    """
    folder.mkdir()
    try:
        packed = base64.b64decode(text.removeprefix(TESTS_LINE), validate=False)
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:xz") as tar:
            # Set as an attribute, because older versions of Python have no such argument.
            tar.extraction_filter = getattr(tarfile, "data_filter", None)
            tar.extractall(folder)  # noqa: S202 -- in a sealed process
    except (binascii.Error, EOFError, lzma.LZMAError, tarfile.TarError) as error:
        raise NotAnArchive(f"the repository's files cannot be unpacked: {error}") from None


def install(job: Job, beside: Path) -> None:
    """Unpack a job's tree and what its build wrote, read-only, into a folder, and let imports find its modules.

    Raises:
        NotAnArchive: it contains other files than it lists, or the files of its build are missing or malformed.
        OSError: see :func:`unpack`.
    """
    folder = beside / _FOLDER
    if folder.exists():  # the same job is taken again
        return
    _unpack_tree(job.tree, folder)
    named = named_tree(job.source)
    assert named is not None
    if named.build:
        try:
            with tarfile.open(Path(job.built, named.hash, shelf.TREE), "r:") as tar:
                tar.extraction_filter = getattr(tarfile, "data_filter", None)
                tar.extractall(folder)  # noqa: S202 -- in a sealed process
        except (OSError, tarfile.TarError) as error:
            raise NotAnArchive(f"the files of the tree's build cannot be unpacked: {error}") from None
    for path in _files(folder):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & 0o555)
    root = str(folder / named.root)
    sys.meta_path.insert(0, _Finder(root))
    sys.path.append(root)  # for packages without __init__.py, after the installed ones


def build(job: Job, beside: Path) -> None:
    """Run the command that builds a job's tree, in the tree's folder, and pack the files that it writes.

    Raises:
        RuntimeError: the command failed, with the end of its output, or wrote too much.
        NotAnArchive, OSError: see :func:`install`.
    """
    named = named_tree(job.source)
    assert named is not None
    folder, log = beside / _FOLDER, beside / "build.log"
    _unpack_tree(job.tree, folder)
    before = {path: path.lstat() for path in _files(folder)}
    environment = {"TORCH_CUDA_ARCH_LIST": job.architectures} if job.architectures else {}
    environment |= os.environ
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    with log.open("wb") as output:
        try:
            status = subprocess.run(
                named.build,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode
        except OSError as error:
            why = "not found" if isinstance(error, FileNotFoundError) else error
            raise RuntimeError(f"the build's program: {named.build[0]}: {why}") from None
    with log.open("rb") as output:
        output.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
        said = output.read().decode(errors="replace").strip()
    print(said, flush=True)  # noqa: T201
    if status:
        lines = said.splitlines() or ["it printed nothing"]
        reason = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1])
        raise RuntimeError(f"{reason}\nthe tree's build ended with status {status}:\n{said}")
    made = [path for path in _files(folder) if _is_made(path, folder, before.get(path))]
    size = sum(path.lstat().st_size for path in made)
    if len(made) > MAX_TREE_FILES or size > shelf.BYTES:
        raise RuntimeError(
            f"the tree's build wrote {len(made)} files of {size / 2**20:.1f} MiB, of which at most {MAX_TREE_FILES} and"
            f" {shelf.BYTES >> 20} MiB are kept: make it write fewer, or remove those that no import needs"
        )
    (place := beside / shelf.MADE / named.hash).mkdir(parents=True)
    with tarfile.open(place / shelf.TREE, "w", format=tarfile.PAX_FORMAT) as tar:
        for path in made:
            tar.add(path, path.relative_to(folder))


def _unpack_tree(tree: str, folder: Path) -> None:
    """Unpack a tree into a new folder, and check that it contains the files that it lists."""
    listed, _, packed = tree.removeprefix(TREE_LINE).partition("\n\n")
    unpack(packed, folder)
    found = set[str]()
    for path in _files(folder):
        content = str(path.readlink()).encode() if path.is_symlink() else path.read_bytes()
        found.add(f"{hashlib.sha256(content).hexdigest()} {path.relative_to(folder)}")
    if found != set(listed.split("\n")):
        raise NotAnArchive("the tree contains other files than it lists")


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()]


def _is_made(path: Path, folder: Path, before: os.stat_result | None) -> bool:
    """Return whether a build wrote a file that another process can use."""
    if path.is_symlink() and (path.readlink().is_absolute() or not path.resolve().is_relative_to(folder.resolve())):
        return False
    now = path.lstat()
    same = before is not None and (before.st_mtime_ns, before.st_size) == (now.st_mtime_ns, now.st_size)
    return not same and path.suffix not in _INTERMEDIATE


class _Finder(importlib.abc.MetaPathFinder):
    """Finds a tree's modules before installed ones, but never in the place of the judge's or torch's."""

    def __init__(self, root: str) -> None:
        self._root = root

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if path is not None or fullname in _KEPT:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, [self._root], target)
        return found if found is not None and found.loader is not None else None
