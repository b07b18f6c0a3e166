"""Conversion of texts and numbers that foreign code influenced into values that Postgres accepts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Final

from kqueue.evidence import json_number

#: Characters that Postgres refuses in text: NUL and surrogates.
_UNFIT: Final = re.compile("[\0\ud800-\udfff]")


def text(value: str) -> str:
    """Return ``value`` with U+FFFD instead of each character that Postgres refuses."""
    return _UNFIT.sub("\ufffd", value)


def json(value: Any) -> Any:
    """Return ``value`` as JSON that Postgres accepts.

    NaN and the infinities become the strings ``NaN``, ``Infinity`` and ``-Infinity``. Sets and tuples become lists.
    Objects that JSON cannot represent become their text.
    """
    match value:
        case None | bool():
            return value
        case str():
            return text(value)
        case int():
            return int(value) if value.bit_length() <= 64 else hex(value)
        case float():
            return json_number(value)
        case Mapping():
            return {text(str(key)): json(item) for key, item in value.items()}
        case list() | tuple() | AbstractSet():
            return [json(item) for item in value]
        case bytes():
            return text(value.decode("utf-8", "replace"))
        case _:
            return text(str(value))
