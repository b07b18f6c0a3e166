"""Cursors: positions in paged lists, which clients send to get the next page."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable
from datetime import datetime
from typing import TypeVar
from uuid import UUID

from kqueue.errors import InvalidRequest

_T = TypeVar("_T")


def make(moment: datetime, identity: UUID | str) -> str:
    """Return the cursor for the page after an entry, given the entry's moment and identity."""
    return base64.urlsafe_b64encode(json.dumps([moment.isoformat(), str(identity)]).encode()).decode()


def read(cursor: str, kind: Callable[[str], _T]) -> tuple[datetime, _T]:
    """Return the moment and identity of a cursor's entry, or raise InvalidRequest. ``kind`` parses the identity."""
    try:
        moment, identity = json.loads(base64.b64decode(cursor, altchars="-_", validate=True))
        parsed = datetime.fromisoformat(moment)
        if parsed.tzinfo is None:
            raise ValueError(moment)
        return parsed, kind(identity)
    except (ValueError, TypeError, AttributeError, binascii.Error, RecursionError):
        raise InvalidRequest("cursor: this API did not create it. Omit it to get the first page") from None
