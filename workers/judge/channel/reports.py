"""What a sealed process tells in a text of its own, in shared memory that the judge creates.

The content is a claim: the reader accepts any bytes, and returns JSON or raises one error.
"""

from __future__ import annotations

import json
import os
from typing import Any, Final, cast

#: Size of the memory, in bytes; a longer text is no report.
SIZE: Final = 1 << 20


class NotReported(Exception):
    """There is no report that can be read."""


def write(memory: int, text: str) -> None:
    """Write a text to the memory behind a descriptor; one that is too long is left out."""
    data = text.encode()
    if len(data) <= SIZE:
        os.pwrite(memory, data, 0)


def read(memory: int) -> dict[str, Any]:
    """Read an untrusted text.

    Raises:
        NotReported: it is no JSON object.
    """
    data = os.pread(memory, SIZE, 0).rstrip(b"\0")
    try:
        told = json.loads(data)
    except (ValueError, RecursionError):
        raise NotReported("the process wrote no report that can be read") from None
    if not isinstance(told, dict):
        raise NotReported("the process wrote no report that can be read")
    return cast("dict[str, Any]", told)
