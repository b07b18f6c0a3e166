"""Lists as Parquet: contents, streaming, and a server without pyarrow."""

from __future__ import annotations

import asyncio
import csv
import io
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine

from kqueue import parquet
from kqueue.categories import Category
from kqueue.contract import Request
from kqueue.web import export
from kqueue.web.export import Format
from tests.http.standin import Served
from tests.samples import ended, request_fields
from tests.web.reading import HOSTILE, judged, search, shown, took

Judge = Callable[..., None]

pyarrow: Any = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pyarrow_parquet: Any = pytest.importorskip("pyarrow.parquet")
TIME = pyarrow.timestamp("us", tz="UTC")


@dataclass(frozen=True, slots=True)
class Sample:
    """A record with a field of each type."""

    name: str
    backend: str | None
    at: datetime
    seen_at: datetime | None
    number: int
    share: float | None
    is_right: bool | None
    scores: dict[str, float] | None = None


def test_a_list_with_types(served: Served, browser: httpx.Client, judge: Judge) -> None:
    """Rows and columns equal the CSV's, with numbers, booleans and times as types, and null for unknown values."""
    right = judged(served, judge, took(0.5), batch="b", kernel_label="=1+1")
    judged(served, judge, ended(Category.CRASHED, message=HOSTILE), batch="b")
    judged(served, judge, batch="other")
    answer = browser.get("/batches/b?format=parquet")
    assert answer.headers["content-type"] == "application/vnd.apache.parquet"
    assert answer.headers["content-disposition"] == 'attachment; filename="batch.parquet"'
    table = read(answer)
    rows = list(csv.DictReader(io.StringIO(browser.get("/batches/b?format=csv").text)))
    assert table.column_names == list(rows[0])
    types = {field.name: field.type for field in table.schema}
    assert (types["speedup"], types["attempts"]) == (pyarrow.float64(), pyarrow.int64())
    assert (types["compiled"], types["finished_at"]) == (pyarrow.bool_(), TIME)
    assert [row["evaluation_id"] for row in table.to_pylist()] == [row["evaluation_id"] for row in rows]
    crashed, passed = table.to_pylist()
    assert (passed["evaluation_id"], passed["speedup"], passed["runtime_ms"]) == (str(right), 2.0, 0.5)
    assert (passed["correctness"], passed["kernel_label"], passed["backend"]) == (True, "=1+1", rows[0]["backend"])
    assert abs(passed["finished_at"] - datetime.now(UTC)) < timedelta(minutes=10)
    assert (crashed["speedup"], crashed["category"]) == (None, "crashed")
    assert "\x1b" not in crashed["message"]


def test_every_list_with_its_filters(engine: Engine, served: Served, browser: httpx.Client, judge: Judge) -> None:
    """Each address with CSV offers Parquet with the same columns, rows and filters, and a link."""
    judged(served, judge, took(0.5), batch="b", problem="class Model: wanted")
    judged(served, judge, took(0.5), batch="c")
    run = search(engine, "alpha")
    search(engine, "beta")
    problem_hash = Request.model_validate(request_fields()).problem_hash
    expected = {"/batches?": 2, "/batches?name=b&": 1, "/batches/b?": 1, "/problems?": 2, "/search?q=wanted&": 1}
    expected |= {f"/problems/{problem_hash}?": 1, f"/problems/{problem_hash}?backend=cuda&": 0}
    expected |= {"/runs?": 2, "/runs?name=alp&": 1, f"/runs/{run.id}?": 4}
    expected |= {"/evaluations?": 2, "/evaluations?batch=b&": 1}
    for address, number in expected.items():
        table = read(browser.get(f"{address}format=parquet"))
        reader = csv.DictReader(io.StringIO(browser.get(f"{address}format=csv").text))
        assert (address, table.num_rows, len(list(reader))) == (address, number, number)
        assert table.column_names == reader.fieldnames, address
        if number:
            link = f"{address}format=parquet".replace("&", "&amp;")
            assert f'href="{link}"' in shown(browser, address.rstrip("?&")), address


def test_values_keep_their_types() -> None:
    """Times are UTC to the microsecond, whatever their zone, and mappings are left out like in CSV."""
    at = datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=timezone(timedelta(hours=2)))
    full = Sample("é\x1b[31m", "triton", at, at, 2**40, 0.1, False, {"a": 1.0})
    table = made([[full, Sample("", None, at, None, -1, None, None)]])
    assert table.to_pylist() == [
        {"name": "é\\x1b[31m", "backend": "triton", "at": at, "seen_at": at, "number": 2**40, "share": 0.1}
        | {"is_right": False},
        {"name": "", "backend": None, "at": at, "seen_at": None, "number": -1, "share": None, "is_right": None},
    ]
    assert table.schema.field("at").type == TIME
    assert [field.name for field in table.schema if not field.nullable] == ["name", "at", "number"]


@pytest.mark.parametrize(("rows", "size"), [(100, 2**30), (10**9, 20_000)], ids=["rows", "bytes"])
def test_a_file_is_sent_while_it_is_read(monkeypatch: pytest.MonkeyPatch, rows: int, size: int) -> None:
    """The file is sent in row groups, and memory holds at most one of them and one page of the list."""
    monkeypatch.setattr(parquet, "GROUP_ROWS", rows)
    monkeypatch.setattr(parquet, "GROUP_BYTES", size)
    monkeypatch.setattr(export, "_CHUNK", 30)
    pages = [[sample(number) for number in range(start, start + 50)] for start in range(0, 5000, 50)]
    read_pages: list[int] = []
    held = pyarrow.total_allocated_bytes()
    parts: list[tuple[int, bytes]] = []
    most = 0

    async def one_by_one() -> AsyncGenerator[Sequence[Sample]]:
        for number, page in enumerate(pages):
            read_pages.append(number)
            yield page

    async def run() -> None:
        nonlocal most
        answer = await export.as_file(Format.PARQUET, "list", Sample, one_by_one())
        async for part in answer.body_iterator:
            assert isinstance(part, bytes)
            parts.append((len(read_pages), part))
            most = max(most, pyarrow.total_allocated_bytes() - held)

    asyncio.run(run())
    file = pyarrow_parquet.ParquetFile(io.BytesIO(b"".join(part for _, part in parts)))
    assert file.read().column("number").to_pylist() == list(range(5000))
    assert file.num_row_groups > 20
    assert parts[0][0] < 10
    assert len(parts) > 20
    assert most < 2**20


def test_without_pyarrow(served: Served, browser: httpx.Client, judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """No page links to it, its address names the package to install, and CSV works."""
    judged(served, judge, took(0.5), batch="b")
    assert "format=parquet" in shown(browser, "/batches")
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyarrow"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert not parquet.can_write()
    for address in ("/batches", "/batches/b", "/problems"):
        page = shown(browser, address)
        assert "format=csv" in page
        assert "parquet" not in page.lower()
    assert "pip install 'kqueue[parquet]'" in shown(browser, "/batches/b?format=parquet", 404).replace("&#39;", "'")
    assert browser.get("/batches/b?format=csv").status_code == 200


def sample(number: int) -> Sample:
    """Return a record of a long list with a unique text."""
    return Sample(f"{number:05} " * 20, None, datetime.now(UTC), None, number, number / 7, None)


def made(pages: Sequence[Sequence[Sample]]) -> Any:
    """Write records to a file, and read it."""

    async def all_pages() -> AsyncGenerator[Sequence[Sample]]:
        for page in pages:
            yield page

    async def run() -> bytes:
        answer = await export.as_file(Format.PARQUET, "list", Sample, all_pages())
        return b"".join([bytes(part) async for part in answer.body_iterator])

    return table_of(asyncio.run(run()))


def read(answer: httpx.Response) -> Any:
    """Return the table in an answer."""
    assert answer.status_code == 200, answer.text
    return table_of(answer.content)


def table_of(content: bytes) -> Any:
    return pyarrow_parquet.read_table(io.BytesIO(content))
