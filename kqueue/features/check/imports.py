"""The files of a tree on which an operator depends, as far as its imports show them. Nothing is imported."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Collection
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


def closure(folder: Path, files: frozenset[str], root: str, entry: str) -> list[str]:
    """Return the files of an entry's module in an unpacked tree, and of all modules that it imports, with packages.

    The module that defines the entry, and near ones, come first.
    """
    module, _, name = entry.partition(":")
    seen, found, left = set[str](), dict[str, None](), deque([module])
    while left:
        module = left.popleft()
        if module in seen or not module:
            continue
        seen.add(module)
        path = file_of(module, files, root)
        if path is not None:
            found[path] = None
            package = module if path.endswith("/__init__.py") else module.rpartition(".")[0]
            imported = _imports(folder / path, package)
            left.extend(one for one, _ in imported)
            left.extendleft(one for one, bound in imported if bound == name)
        left.append(module.rpartition(".")[0])
    return list(found)


def touched(changed: frozenset[str], files: Collection[str], *, built: bool = False) -> bool:
    """Return whether a change of some paths can change the operator that depends on ``files``.

    A file that is no module, such as CUDA code, counts for all operators of its top folder, or for all if the
    repository is ``built``. One in the repository's own folder, such as setup.py, counts for all.
    """
    tops = {PurePosixPath(file).parts[0] for file in files}
    for path in map(PurePosixPath, changed):
        top, *below = path.parts
        if str(path) in files:
            return True
        if path.suffix not in _IDLE and (not below or (path.suffix != ".py" and (built or top in tops))):
            return True
    return False


def defines(path: Path, name: str) -> bool:
    """Return whether a module can define a name, as far as its text shows it."""
    tree = _parsed(path)
    if tree is None:
        return True
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=found) | ast.AsyncFunctionDef(name=found) | ast.ClassDef(name=found):
                names = {found}
            case ast.Name(id=found, ctx=ast.Store()):
                names = {found}
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names = {alias.asname or alias.name for alias in aliases}
            case _:
                continue
        if names & {name, "*", "__getattr__"}:
            return True
    return False


def _parsed(path: Path) -> ast.Module | None:
    try:
        return ast.parse(read_text(path, _MOST_BYTES)) if path.suffix == ".py" else None
    except (InvalidRequest, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


@cache  # because the closures of a package's operators share most files
def _imports(path: Path, package: str) -> list[tuple[str, str]]:
    """Return the modules that a file imports, and the names in them, which can be modules too, each with its name here.

    A revision's files do not change.
    """
    found: list[tuple[str, str]] = []
    for node in ast.walk(_parsed(path) or ast.Module([], [])):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            found += [(module, alias.asname or alias.name) for alias in node.names]
            found += [(f"{module}.{alias.name}", "") for alias in node.names if alias.name != "*"]
    return found
