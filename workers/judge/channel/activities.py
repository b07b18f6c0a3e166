"""A candidate's report of what a call ran on the GPU, in a page of shared memory that the judge creates.

The candidate writes the page once. The judge copies it before reading. The content is untrusted: the reader accepts any
bytes, and returns rows or raises one error.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from mmap import mmap
from typing import Final, NamedTuple

#: Size of the page in bytes.
SIZE: Final = 16 << 10
#: Length in bytes to which a kernel's name is cut. A name precedes its template arguments.
MAX_NAME_BYTES: Final = 300
#: Name of the row with the totals of all rows that did not fit.
REST: Final = "[rest]"

_MAGIC: Final = 0x6B714143  # "kqAC"
_HEAD: Final = struct.Struct("<III")  # magic, 1 for a failure (the first name is the reason), number of rows
_ROW: Final = struct.Struct("<QIH")  # nanoseconds, launches, bytes of the name that follows


class NotRecorded(Exception):
    """Raised where there are no activities. The message gives the reason, and can be text of the candidate."""


class Activity(NamedTuple):
    """All launches of one kernel in one call, all copies (``[memcpy]``) or all fills (``[memset]``)."""

    name: str
    ns: int
    launches: int


def encode(rows: Iterable[tuple[str, int, int]]) -> bytes:
    """Return the page's content for name, nanoseconds and launches of each kernel, the most expensive first.

    Rows that do not fit are combined into one row.
    """
    packed, left = list[bytes](), SIZE - _HEAD.size - _ROW.size - len(REST)
    rest_ns = rest_launches = 0
    for name, ns, launches in rows:
        row = _row(name, ns, launches)
        if rest_launches == 0 and len(row) <= left:
            packed.append(row)
            left -= len(row)
        else:
            rest_ns, rest_launches = rest_ns + ns, rest_launches + max(launches, 1)
    if rest_launches:
        packed.append(_row(REST, rest_ns, rest_launches))
    return _page(packed, failed=False)


def encode_failure(reason: str) -> bytes:
    """Return the page's content if nothing could be recorded."""
    return _page([_row(reason, 0, 0)], failed=True)


def decode(page: bytes | bytearray | memoryview | mmap) -> list[Activity]:
    """Read the rows of an untrusted page. Copy it first, because the candidate can still change it.

    Raise NotRecorded if the candidate reports a failure, or the page is malformed.
    """
    data = bytes(page)
    if len(data) < _HEAD.size or not any(data[: _HEAD.size]):
        raise NotRecorded("the candidate wrote nothing")
    magic, failed, count = _HEAD.unpack_from(data)
    if magic != _MAGIC or failed > 1 or count > SIZE // _ROW.size:
        raise NotRecorded("the candidate wrote a malformed report")
    rows, at = list[Activity](), _HEAD.size
    for _ in range(count):
        if at + _ROW.size > len(data):
            raise NotRecorded("the candidate wrote a malformed report")
        ns, launches, length = _ROW.unpack_from(data, at)
        at += _ROW.size
        if length > MAX_NAME_BYTES or at + length > len(data):
            raise NotRecorded("the candidate wrote a malformed report")
        text = data[at : at + length].decode("utf-8", "replace")
        rows.append(Activity("".join(char if char.isprintable() else "\ufffd" for char in text), ns, launches))
        at += length
    if failed:
        raise NotRecorded(rows[0].name if rows else "the candidate gave no reason")
    return rows


def _page(rows: Sequence[bytes], *, failed: bool) -> bytes:
    return _HEAD.pack(_MAGIC, failed, len(rows)) + b"".join(rows)


def _row(name: str, ns: int, launches: int) -> bytes:
    text = name.encode("utf-8", "replace")[:MAX_NAME_BYTES]
    return _ROW.pack(min(max(ns, 0), 2**64 - 1), min(max(launches, 0), 2**32 - 1), len(text)) + text
