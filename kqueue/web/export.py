"""Lists as CSV: for spreadsheets and scripts."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse

from kqueue.text import clean

#: The most rows of a file: a page cannot be asked for a whole database.
MOST_ROWS: Final = 100_000
#: Rows that are written at once, in a thread: no other request waits for them.
_CHUNK: Final = 1000
#: The places before what a spreadsheet would take for the beginning of a formula: of the text, and of what is a cell of
#: its own where semicolons, tabs or lines part them. White space and quotation marks before the sign do not count.
#: A text that begins with a tab or a line feed is one too.
_FORMULA: Final = re.compile(r"""^(?= *[\t\n])|(?:^|(?<=[;\t\n]))(?=(?:[^\S\t\n]|")*[=+\-@\uff1d\uff0b\uff0d\uff20])""")


class Format(StrEnum):
    """The forms of a list."""

    HTML = "html"
    CSV = "csv"


def as_csv(name: str, kind: type[Any], pages: AsyncIterable[Sequence[Any]]) -> StreamingResponse:
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
            for start in range(0, min(len(page), left), _CHUNK):
                yield await run_in_threadpool(_records, page[start : min(start + _CHUNK, left)], columns)
            left -= len(page)
            if left <= 0:
                return

    headers = {"Content-Disposition": f'attachment; filename="{name}.csv"'}
    return StreamingResponse(lines(), media_type="text/csv; charset=utf-8", headers=headers)


async def one_page(records: Sequence[Any]) -> AsyncGenerator[Sequence[Any]]:
    """Yield all records at once, for :func:`as_csv`."""
    yield records


def cell(value: object) -> str:
    """Return a value for a cell. An apostrophe stands before what a spreadsheet would take for a formula."""
    match value:
        case None:
            return ""
        case datetime():
            return value.isoformat()
        case bool() | int() | float():
            return str(value)
        case _:
            return _FORMULA.sub("'", clean(value))


def _records(records: Sequence[Any], columns: Sequence[str]) -> bytes:
    return _lines([[cell(getattr(record, column)) for column in columns] for record in records])


def _lines(rows: Sequence[Sequence[str]]) -> bytes:
    held = io.StringIO()
    csv.writer(held).writerows(rows)
    return held.getvalue().encode("utf-8", "replace")
