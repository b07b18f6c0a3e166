"""Places in lists, as those who page through them hand them back."""

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
    """Return the cursor of what follows an entry, by its moment and its identity."""
    return base64.urlsafe_b64encode(json.dumps([moment.isoformat(), str(identity)]).encode()).decode()


def read(cursor: str, kind: Callable[[str], _T]) -> tuple[datetime, _T]:
    """Return the place that a cursor names: a moment, and an identity that ``kind`` reads.

    Raises:
        InvalidRequest: it is none of ours.
    """
    try:
        moment, identity = json.loads(base64.b64decode(cursor, altchars="-_", validate=True))
        known = datetime.fromisoformat(moment)
        if known.tzinfo is None:
            raise ValueError(moment)
        return known, kind(identity)
    except (ValueError, TypeError, AttributeError, binascii.Error, RecursionError):
        raise InvalidRequest("cursor: not one that this API gave; leave it out to begin anew") from None
