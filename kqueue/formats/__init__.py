"""Other projects' problems, translated into kqueue's form: ``Model``, ``get_inputs`` and ``SHAPES``.

Each format is a module with ``find`` (its files at a path), ``read`` (its entries) and ``kernel`` (a kernel of the
format as ``ModelNew``). Translation reads text and runs nothing. A translated problem is foreign code like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Final

from kqueue.errors import InvalidRequest
from kqueue.formats import common, flashinfer, gpumode, kernelbook, robust_kbench
from kqueue.formats.common import Problem, Refused, origin

__all__ = ["FORMATS", "Problem", "Refused", "kernel", "one", "origin", "read", "recognise"]

#: The formats by name, in the order in which a path is tried.
FORMATS: Final[dict[str, ModuleType]] = {one.NAME: one for one in (gpumode, flashinfer, robust_kbench, kernelbook)}
#: Number of names that a message lists.
_SHOWN: Final = 5


def recognise(path: Path) -> str | None:
    """Return the name of the format of a file or folder, or None."""
    return next((name for name, module in FORMATS.items() if module.find(path)), None)


def read(path: Path) -> Iterator[Problem | Refused]:
    """Return an iterator over the entries of a file or folder, in the set's order."""
    if not path.exists():
        raise InvalidRequest(f"{path}: No such file or directory")
    name = recognise(path)
    if name is None:
        formats = ", ".join(module.TITLE for module in FORMATS.values())
        raise InvalidRequest(f"{path}: has no problem in a known format ({formats})")
    return FORMATS[name].read(path)


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
    module = FORMATS.get(str(facts.get("format")))
    if module is None or "ModelNew" in common.defined(source):
        return source
    try:
        return module.kernel(source, facts, problem)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(f"problem: its {common.ORIGIN} is malformed: {error!r}") from None
