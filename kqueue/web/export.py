"""Lists as CSV: for spreadsheets and scripts."""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from fastapi.responses import StreamingResponse

from kqueue.text import clean

#: The most rows of a file: a page cannot be asked for a whole database.
MOST_ROWS: Final = 100_000
#: What a spreadsheet would take for the beginning of a formula.
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\n")


class Format(StrEnum):
    """The forms of a list."""

    HTML = "html"
    CSV = "csv"


def as_csv(name: str, kind: type[Any], pages: AsyncIterable[Iterable[Any]]) -> StreamingResponse:
    """Return records as a file, sent while they are read; :data:`MOST_ROWS` at most.

    Args:
        name: the file's name, of ASCII, without its ending.
        kind: the records' dataclass. Its fields are the columns, but for those that hold mappings.
        pages: the records, some at a time.
    """
    columns = [name for name, field in kind.__dataclass_fields__.items() if not str(field.type).startswith("dict")]

    async def lines() -> AsyncGenerator[bytes]:
        yield _lines([columns])
        left = MOST_ROWS
        async for page in pages:
            rows = [[cell(getattr(record, column)) for column in columns] for record in page][:left]
            yield _lines(rows)
            left -= len(rows)
            if left <= 0:
                return

    headers = {"Content-Disposition": f'attachment; filename="{name}.csv"'}
    return StreamingResponse(lines(), media_type="text/csv; charset=utf-8", headers=headers)


async def one_page(records: Sequence[Any]) -> AsyncGenerator[Sequence[Any]]:
    """Yield all records at once, for :func:`as_csv`."""
    yield records


def cell(value: object) -> str:
    """Return a value for a cell. A text that a spreadsheet would take for a formula begins with an apostrophe."""
    match value:
        case None:
            return ""
        case datetime():
            return value.isoformat()
        case bool() | int() | float():
            return str(value)
        case _:
            shown = clean(value)
            return f"'{shown}" if shown.lstrip(" ").startswith(_FORMULA) else shown


def _lines(rows: Iterable[Sequence[str]]) -> bytes:
    held = io.StringIO()
    csv.writer(held).writerows(rows)
    return held.getvalue().encode("utf-8", "replace")
