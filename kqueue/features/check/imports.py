"""The files of a tree on which an operator depends, as far as its imports show them. Nothing is imported."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Mapping
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Final

from kqueue.errors import InvalidRequest
from kqueue.features.check.operators import file_of
from kqueue.files import read_text

#: Endings of files that no operator depends on.
_IDLE: Final = frozenset({".md", ".rst", ".txt", ".png", ".svg", ".ipynb"})
#: Maximum size in bytes of a module whose imports are read.
_MOST_BYTES: Final = 4 << 20


def closure(folder: Path, files: frozenset[str], root: str, entry: str) -> dict[str, str]:
    """Return the files of an entry's module in an unpacked tree, and of all modules that it imports, with packages.

    Each has the file whose import of it was found first, which is the file itself for the entry's module.
    """
    seen, found, left = set[str](), dict[str, str](), deque([(entry.partition(":")[0], "")])
    while left:
        module, importer = left.popleft()
        if module in seen or not module:
            continue
        seen.add(module)
        path = file_of(module, files, root)
        if path is not None:
            found[path] = importer or path
            left.extend((one, path) for one, _, _ in _imports(folder / path, module))
        left.append((module.rpartition(".")[0], path or importer))
    return found


def nearest(folder: Path, files: frozenset[str], root: str, entry: str) -> list[str]:
    """Return the files of the module that defines an entry, and of all modules that it uses, the nearest first.

    A module that only passes a name on, such as a package that imports all operators, counts for none of its other
    imports.
    """
    module, _, name = entry.partition(":")
    seen, found, left = set[tuple[str, str]](), dict[str, None](), deque([(module, name)])
    while left:
        module, name = one = left.popleft()
        path = file_of(module, files, root)
        if path is None or one in seen:
            continue
        seen.add(one)
        imported = _imports(folder / path, module)
        bound = [(of, there) for of, there, here in imported if name and here == name]
        if not bound and not (name and file_of(f"{module}.{name}", files, root)):
            found[path] = None
            bound = [(of, name if here == "*" else there) for of, there, here in imported]
        left.extend(bound)
    return list(found)


def touched(changed: frozenset[str], files: Mapping[str, str], *, built: bool = False) -> str:
    """Return how a change of some paths can change the operator that depends on ``files``, or nothing if it cannot.

    A file that is no module, such as CUDA code, counts for all operators of its top folder, or for all if the
    repository is ``built``. One in the repository's own folder, such as setup.py, counts for all.
    """
    tops = {PurePosixPath(file).parts[0] for file in files}
    if own := sorted(changed & files.keys(), key=lambda path: (files[path] != path, path)):
        return f"{own[0]} changed" if files[own[0]] == own[0] else f"{files[own[0]]} imports the changed {own[0]}"
    for path in map(PurePosixPath, sorted(changed)):
        top, *below = path.parts
        if path.suffix not in _IDLE and (not below or (path.suffix != ".py" and (built or top in tops))):
            return f"{path} changed"
    return ""


def defines(path: Path, name: str) -> bool:
    """Return whether a module can define a name, as far as its text shows it."""
    tree = _parsed(path)
    if tree is None:
        return True
    names = {here for *_, here in _imports(path, "")}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return not names.isdisjoint({name, "*", "__getattr__"})


def _parsed(path: Path) -> ast.Module | None:
    try:
        return ast.parse(read_text(path, _MOST_BYTES)) if path.suffix == ".py" else None
    except (InvalidRequest, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


@cache  # because the closures of a package's operators share most files
def _imports(path: Path, module: str) -> list[tuple[str, str, str]]:
    """Return the modules that a file imports, each with the imported name there and here, or without.

    An imported name can be a module too. A revision's files do not change.
    """
    found: list[tuple[str, str, str]] = []
    parts = [*module.split("."), *["__init__"] * (path.name == "__init__.py")]
    for node in ast.walk(_parsed(path) or ast.Module([], [])):
        if isinstance(node, ast.Import):
            found += [(alias.name, "", alias.asname or alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parts[: len(parts) - node.level]) if node.level else ""
            of = ".".join(filter(None, (base, node.module)))
            for alias in node.names:
                here = alias.asname or alias.name
                found += [(of, alias.name, here), *([(f"{of}.{alias.name}", "", here)] * (here != "*"))]
    return found
