"""The files of :mod:`kqueue.trees` in a sealed process: unpacked, and on the import path."""

from __future__ import annotations

import base64
import binascii
import hashlib
import importlib.abc
import importlib.machinery
import io
import lzma
import sys
import tarfile
from pathlib import Path
from typing import Any, Final

from kqueue.contract import TESTS_LINE, TREE_LINE, named_tree

#: Name of a tree's folder, next to the source that names it.
_FOLDER: Final = "tree"
#: Modules that no tree replaces: the standard library, the judge's own packages, and packages that it has loaded.
_KEPT: Final = sys.stdlib_module_names | {"kqueue", "migrations", "numpy", "torch", "triton", "workers"}


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


def install(tree: str, source: str, beside: Path) -> None:
    """Unpack the tree that a source names, read-only, into a folder, and let imports find its modules.

    Raises:
        NotAnArchive: it contains other files than it lists.
        OSError: see :func:`unpack`.
    """
    folder = beside / _FOLDER
    if folder.exists():  # the same job is taken again
        return
    listed, _, packed = tree.removeprefix(TREE_LINE).partition("\n\n")
    unpack(packed, folder)
    found = set[str]()
    for path in folder.rglob("*"):
        if path.is_symlink() or path.is_file():
            content = str(path.readlink()).encode() if path.is_symlink() else path.read_bytes()
            found.add(f"{hashlib.sha256(content).hexdigest()} {path.relative_to(folder)}")
            if not path.is_symlink():
                path.chmod(path.stat().st_mode & 0o555)
    if found != set(listed.split("\n")):
        raise NotAnArchive("the tree contains other files than it lists")
    named = named_tree(source)
    root = str(folder / named.root) if named is not None else str(folder)
    sys.meta_path.insert(0, _Finder(root))
    sys.path.append(root)  # for packages without __init__.py, after the installed ones


class _Finder(importlib.abc.MetaPathFinder):
    """Finds a tree's modules before installed ones, but never in the place of the judge's or torch's."""

    def __init__(self, root: str) -> None:
        self._root = root

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if path is not None or fullname in _KEPT:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, [self._root], target)
        return found if found is not None and found.loader is not None else None
