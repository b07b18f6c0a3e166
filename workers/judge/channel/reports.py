"""Reports of a sealed process as JSON text in shared memory that the judge creates.

The content is untrusted: the reader accepts any bytes, and returns JSON or raises one error.
"""

from __future__ import annotations

import json
import os
from typing import Any, Final, cast

#: Size of the memory in bytes, and maximum length of a report.
SIZE: Final = 1 << 20


class NotReported(Exception):
    """Raised where there is no readable report."""


def write(memory: int, text: str) -> None:
    """Write a text to the memory of a descriptor. Write nothing if the text is too long."""
    data = text.encode()
    if len(data) <= SIZE:
        os.pwrite(memory, data, 0)


def read(memory: int) -> dict[str, Any]:
    """Read an untrusted text. Raise NotReported if it is not a JSON object."""
    data = os.pread(memory, SIZE, 0).rstrip(b"\0")
    try:
        report = json.loads(data)
    except (ValueError, RecursionError):
        raise NotReported("the process wrote no readable report") from None
    if not isinstance(report, dict):
        raise NotReported("the process wrote no readable report")
    return cast("dict[str, Any]", report)
