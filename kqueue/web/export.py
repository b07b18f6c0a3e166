"""Lists as files: CSV for spreadsheets and scripts, Parquet for data frames."""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from enum import StrEnum
from typing import Annotated, Any, Final

from fastapi import Query
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse

from kqueue import parquet
from kqueue.errors import ConfigError
from kqueue.http.failures import HttpError
from kqueue.text import cell

#: Maximum number of rows of a file, so that no request reads the whole database.
MOST_ROWS: Final = 100_000
#: Number of rows that a thread writes at a time, so that the event loop stays free for other requests.
_CHUNK: Final = 1000


class Format(StrEnum):
    """The forms of a list."""

    HTML = "html"
    CSV = "csv"
    PARQUET = "parquet"


#: The form in which a URL asks for a list.
FormatQuery = Annotated[Format, Query(alias="format")]


def offered() -> list[tuple[Format, str]]:
    """Return the file formats that this installation can write, with their names."""
    return [(Format.CSV, "CSV"), *([(Format.PARQUET, "Parquet")] if parquet.can_write() else [])]


async def as_file(form: Format, name: str, kind: type[Any], pages: AsyncIterable[Sequence[Any]]) -> StreamingResponse:
    """Return at most :data:`MOST_ROWS` records as a file, which is sent while the records are read in pages.

    ``name`` is in ASCII, without an extension. The fields of ``kind`` are the columns, except fields with mappings.
    """
    columns = [name for name, field in kind.__dataclass_fields__.items() if "dict[" not in str(field.type)]
    if form is Format.CSV:
        media_type, content = "text/csv; charset=utf-8", _csv(columns, pages)
    else:
        try:
            writer = await run_in_threadpool(parquet.Writer, kind, columns)
        except ConfigError as error:
            raise HttpError(404, str(error)) from None
        media_type, content = "application/vnd.apache.parquet", _parquet(writer, pages)
    headers = {"Content-Disposition": f'attachment; filename="{name}.{form}"'}
    return StreamingResponse(content, media_type=media_type, headers=headers)


async def _csv(columns: Sequence[str], pages: AsyncIterable[Sequence[Any]]) -> AsyncGenerator[bytes]:
    yield _lines([columns])
    async for some in _chunks(pages):
        yield await run_in_threadpool(_records, some, columns)


async def _parquet(writer: parquet.Writer, pages: AsyncIterable[Sequence[Any]]) -> AsyncGenerator[bytes]:
    async for some in _chunks(pages):
        if made := await run_in_threadpool(writer.add, some):
            yield made
    yield await run_in_threadpool(writer.end)


async def _chunks(pages: AsyncIterable[Sequence[Any]]) -> AsyncGenerator[Sequence[Any]]:
    """Yield the records in chunks for writing, up to the maximum of a file."""
    left = MOST_ROWS
    async for page in pages:
        for start in range(0, min(len(page), left), _CHUNK):
            yield page[start : min(start + _CHUNK, left)]
        left -= len(page)
        if left <= 0:
            return


async def one_page(records: Sequence[Any]) -> AsyncGenerator[Sequence[Any]]:
    """Yield all records in one page, for :func:`as_file`."""
    yield records


def _records(records: Sequence[Any], columns: Sequence[str]) -> bytes:
    return _lines([[cell(getattr(record, column)) for column in columns] for record in records])


def _lines(rows: Sequence[Sequence[str]]) -> bytes:
    held = io.StringIO()
    csv.writer(held).writerows(rows)
    return held.getvalue().encode("utf-8", "replace")
