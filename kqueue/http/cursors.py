"""Cursors: positions in paged lists, which clients send to get the next page."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TypeVar
from uuid import UUID

from kqueue.contract import HASH
from kqueue.errors import InvalidRequest

_T = TypeVar("_T")


def page(
    entries: Sequence[_T], limit: int, place: Callable[[_T], tuple[datetime, UUID | str]]
) -> tuple[Sequence[_T], str | None]:
    """Return the first ``limit`` entries, and the cursor of the next page if there are more.

    ``place`` returns an entry's moment and identity.
    """
    if len(entries) <= limit:
        return entries, None
    moment, identity = place(entries[limit - 1])
    cursor = base64.urlsafe_b64encode(json.dumps([moment.isoformat(), str(identity)]).encode()).decode()
    return entries[:limit], cursor


def checked_hash(text: str) -> str:
    """Return a text if it is a hash, else raise ValueError."""
    if not re.fullmatch(HASH, text):
        raise ValueError(text)
    return text


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
