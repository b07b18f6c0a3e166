"""Parsers of times and durations that users write."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from kqueue.errors import InvalidRequest

_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def duration(value: str) -> timedelta | None:
    """Return the duration that ``30m``, ``2h`` or ``7d`` stands for, or None for another text.

    Raises:
        OverflowError: it is too long.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", value)
    return None if match is None else timedelta(**{_UNITS[match[2]]: float(match[1])})


def since(value: str, option: str = "--since") -> datetime:
    """Return the time of an option: an age such as ``2h``, or a date or time, in UTC unless it has a zone.

    Raises:
        InvalidRequest: the value is neither.
    """
    try:
        if (passed := duration(value)) is not None:
            return datetime.now(UTC) - passed
        named = datetime.fromisoformat(value)
    except (ValueError, OverflowError):
        raise InvalidRequest(
            f"{option} {value}: write an age such as 30m, 2h, 7d, or a date such as 2026-01-31"
        ) from None
    return named if named.tzinfo else named.replace(tzinfo=UTC)
