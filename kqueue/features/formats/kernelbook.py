"""KernelBook's rows: JSON, JSON lines or Parquet with ``python_code``, ``entry_point`` and ``triton_code``.

A row's module becomes ``Model``. Its kernel is the class of the same name with ``New`` at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import create_model

from kqueue.formats import common
from kqueue.formats.common import Problem, Refused

NAME: Final = "kernelbook"
TITLE: Final = "KernelBook"
_CODE: Final = "python_code"
_Row: Any = create_model("_Row", python_code=str, entry_point=str, triton_code=(str | None, None))


def find(path: Path) -> list[Path]:
    """Return the files with rows at a path."""
    files = sorted(path.glob("*")) if path.is_dir() else [path]
    return [file for file in files if file.is_file() and _has_rows(file)]


def read(path: Path) -> Iterator[Problem | Refused]:
    """Yield the rows at a path."""
    for file in find(path):
        for number, row in enumerate(common.rows(file), 1):
            name = f"{row.get('entry_point', 'row')}_{row.get('uuid', number)}"
            yield common.attempt(name, lambda name=name, row=row: _translate(name, common.valid(_Row, row)))


def kernel(source: str, facts: Mapping[str, Any], problem: str) -> str:  # noqa: ARG001
    """Return a kernel with the names of a row's under the name ``ModelNew``."""
    entry = f"{facts['entry_point']}New"
    return f"{source}\n\nModelNew = {entry}\n" if entry in common.defined(source) else source


def _translate(name: str, row: Any) -> Problem:
    ours = frozenset[str]() if row.entry_point == "Model" else frozenset({"Model"})
    common.reference(row.python_code, _CODE, {row.entry_point, "get_inputs", "get_init_inputs"}, ours)
    text = common.assignments({"format": NAME, "name": name, "entry_point": row.entry_point}, ())
    text += f"Model = {row.entry_point}\n" if ours else ""
    solutions = {} if row.triton_code is None else {"triton_code": row.triton_code}
    return Problem(name, f"{row.python_code}\n\n{text}", (), solutions)


def _has_rows(file: Path) -> bool:
    if file.suffix not in (".json", ".jsonl"):
        return file.suffix == ".parquet"
    with file.open("rb") as stream:
        return f'"{_CODE}"'.encode() in stream.read(4 << 20)  # other long columns can come before it
