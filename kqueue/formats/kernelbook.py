"""KernelBook's rows: JSON, JSON lines or Parquet with ``python_code``, ``entry_point`` and ``triton_code``.

A row's module becomes ``Model``. Its kernel is the class of the same name with ``New`` at the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

from kqueue.errors import InvalidRequest
from kqueue.formats import common
from kqueue.formats.common import Problem, Refused

NAME: Final = "kernelbook"
TITLE: Final = "KernelBook"
_CODE: Final = "python_code"


def find(path: Path) -> list[Path]:
    """Return the files with rows at a path."""
    files = sorted(path.glob("*")) if path.is_dir() else [path]
    return [file for file in files if file.is_file() and _has_rows(file)]


def read(path: Path) -> Iterator[Problem | Refused]:
    """Yield the rows at a path."""
    for file in find(path):
        for number, row in enumerate(_rows(file), 1):
            if isinstance(row, dict):
                known = cast("dict[str, Any]", row)
                name = f"{known.get('entry_point')}_{known.get('uuid', number)}"
                yield common.attempt(name, lambda name=name, known=known: _translate(name, known))
            else:
                yield Refused(f"row {number}", "it is no JSON object")


def kernel(source: str, facts: Mapping[str, Any], problem: str) -> str:  # noqa: ARG001
    """Return a kernel with the names of a row's under the name ``ModelNew``."""
    entry = f"{facts['entry_point']}New"
    return f"{source}\n\nModelNew = {entry}\n" if entry in common.defined(source) else source


def _translate(name: str, row: Mapping[str, Any]) -> Problem:
    code, entry, triton = row.get(_CODE), row.get("entry_point"), row.get("triton_code")
    if not isinstance(code, str) or not isinstance(entry, str):
        raise InvalidRequest(f"{_CODE} and entry_point are no texts")
    ours = frozenset() if entry == "Model" else frozenset({"Model"})
    common.reference(code, _CODE, {entry, "get_inputs", "get_init_inputs"}, ours)
    text = common.assignments({"format": NAME, "name": name, "entry_point": entry}, ())
    text += f"Model = {entry}\n" if ours else ""
    return Problem(name, f"{code}\n\n{text}", solutions={"triton_code": triton} if isinstance(triton, str) else {})


def _has_rows(file: Path) -> bool:
    if file.suffix not in (".json", ".jsonl"):
        return file.suffix == ".parquet"
    with file.open("rb") as stream:
        return f'"{_CODE}"'.encode() in stream.read(4 << 20)  # other long columns can come before it


def _rows(file: Path) -> Iterator[object]:
    """Yield a file's rows. A line that is not JSON is None."""
    if file.suffix == ".parquet":
        try:
            from pyarrow import ArrowException, parquet
        except ImportError:
            raise InvalidRequest(f"{file}: Parquet needs pyarrow: install kqueue[parquet]") from None
        try:
            for batch in parquet.ParquetFile(file).iter_batches(batch_size=256):
                yield from batch.to_pylist()
        except (ArrowException, OSError) as error:
            raise InvalidRequest(f"{file}: no Parquet file: {error}") from None
    elif file.suffix == ".json":
        rows = _json(file.read_bytes())
        yield from cast("list[object]", rows) if isinstance(rows, list) else [rows]
    else:
        with file.open("rb") as stream:
            yield from map(_json, filter(bytes.strip, stream))


def _json(text: bytes) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
