"""Other projects' problems, translated into kqueue's form: ``Model``, ``get_inputs`` and ``SHAPES``.

A feature attaches a format, a module with ``NAME``, ``TITLE``, ``find`` (its files at a path), ``read`` (entries) and
``kernel`` (a kernel of the format as ``ModelNew``). Translation reads text and runs nothing. A translated problem is
foreign code like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final

from kqueue import registry
from kqueue.errors import InvalidRequest
from kqueue.formats import common
from kqueue.formats.common import Problem, Refused, origin

__all__ = ["Problem", "Refused", "kernel", "one", "origin", "read", "recognise"]

#: Number of names that a message lists.
_SHOWN: Final = 5


@cache
def _modules() -> dict[str, Any]:
    """Return the formats by name, in the order in which a path is tried."""
    return {module.NAME: module for module in map(resolve_name, registry.each_of("formats"))}


def recognise(path: Path) -> str | None:
    """Return the name of the format of a file or folder, or None."""
    return next((name for name, module in _modules().items() if module.find(path)), None)


def read(path: Path) -> Iterator[Problem | Refused]:
    """Return an iterator over the entries of a file or folder, in the set's order."""
    if not path.exists():
        raise InvalidRequest(f"{path}: No such file or directory")
    name = recognise(path)
    if name is None:
        formats = ", ".join(module.TITLE for module in _modules().values())
        raise InvalidRequest(f"{path}: has no problem in a known format ({formats})")
    return _modules()[name].read(path)


def one(path: Path, name: str | None) -> Problem:
    """Return the problem with a name, or the only one. The message of an InvalidRequest has the names or the reason."""
    entries = (entry for entry in read(path) if name in (None, entry.name))
    found = list(islice(entries, _SHOWN if name is None else 1))
    if not found:
        raise InvalidRequest(f"{path}: has no problem {name!r}: `kqueue problems import {path}` lists them")
    if len(found) > 1:
        names = ", ".join(entry.name for entry in found)
        raise InvalidRequest(f"{path}: has several problems: choose one as {path}#NAME, such as {names}")
    if isinstance(found[0], Refused):
        raise InvalidRequest(f"{path}: {found[0].name} cannot be translated: {found[0].reason}")
    return found[0]


def kernel(problem: str, source: str) -> str:
    """Return a kernel in the form that a translated problem needs. Other problems' kernels are returned unchanged."""
    facts = origin(problem)
    module = _modules().get(str(facts.get("format")))
    if module is None or "ModelNew" in common.defined(source):
        return source
    try:
        return module.kernel(source, facts, problem)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(f"problem: its {common.ORIGIN} is malformed: {error!r}") from None
