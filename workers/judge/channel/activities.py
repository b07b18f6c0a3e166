"""What a call ran on the GPU, as the candidate tells it: a page of shared memory that the judge makes.

The candidate writes it once, the judge takes a copy and reads that. Whatever stands there is a claim; of any
bytes at all the reader makes rows or one error.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from mmap import mmap
from typing import Final, NamedTuple

#: Bytes of the page.
SIZE: Final = 16 << 10
#: Bytes of a kernel's name that are kept. Its own name stands before its template's arguments.
MAX_NAME_BYTES: Final = 300
#: The row with what did not fit.
REST: Final = "[rest]"

_MAGIC: Final = 0x6B714143  # "kqAC"
_HEAD: Final = struct.Struct("<III")  # magic, 1 if the text of one name is why there are none, rows
_ROW: Final = struct.Struct("<QIH")  # nanoseconds, launches, bytes of the name that follows


class NotRecorded(Exception):
    """There are no activities; the message says why, perhaps in the candidate's words."""


class Activity(NamedTuple):
    """All launches of one kernel in one call, or all copies (``[memcpy]``) or fills (``[memset]``)."""

    name: str
    ns: int
    launches: int


def encode(rows: Iterable[tuple[str, int, int]]) -> bytes:
    """The page for ``(name, nanoseconds, launches)``, the most expensive first; what does not fit becomes one row."""
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
    """The page's content where nothing could be recorded."""
    return _page([_row(reason, 0, 0)], failed=True)


def decode(page: bytes | bytearray | memoryview | mmap) -> list[Activity]:
    """The rows of a page that may hold anything. It is copied first, as its writer may still change it.

    Raises:
        NotRecorded: the candidate says so, or what it wrote cannot be read.
    """
    data = bytes(page)
    if len(data) < _HEAD.size or not any(data[: _HEAD.size]):
        raise NotRecorded("the candidate wrote nothing")
    magic, failed, count = _HEAD.unpack_from(data)
    if magic != _MAGIC or failed > 1 or count > SIZE // _ROW.size:
        raise NotRecorded("the candidate wrote what cannot be read")
    rows, at = list[Activity](), _HEAD.size
    for _ in range(count):
        if at + _ROW.size > len(data):
            raise NotRecorded("the candidate wrote what cannot be read")
        ns, launches, length = _ROW.unpack_from(data, at)
        at += _ROW.size
        if length > MAX_NAME_BYTES or at + length > len(data):
            raise NotRecorded("the candidate wrote what cannot be read")
        rows.append(Activity(_text(data[at : at + length]), ns, launches))
        at += length
    if failed:
        raise NotRecorded(rows[0].name if rows else "the candidate gave no reason")
    return rows


def _page(rows: Sequence[bytes], *, failed: bool) -> bytes:
    return _HEAD.pack(_MAGIC, failed, len(rows)) + b"".join(rows)


def _row(name: str, ns: int, launches: int) -> bytes:
    text = name.encode("utf-8", "replace")[:MAX_NAME_BYTES]
    return _ROW.pack(min(max(ns, 0), 2**64 - 1), min(max(launches, 0), 2**32 - 1), len(text)) + text


def _text(name: bytes) -> str:
    """Printable text; what is not becomes a replacement character."""
    return "".join(char if char.isprintable() else "\ufffd" for char in name.decode("utf-8", "replace"))
