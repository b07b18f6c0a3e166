"""Making texts and numbers that foreign code influenced fit for Postgres."""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Final

from kqueue.evidence import json_number

#: Text in Postgres holds neither NUL nor half a surrogate pair.
_UNFIT: Final = re.compile("[\0\ud800-\udfff]")


def text(value: str) -> str:
    """Return ``value`` with U+FFFD in the place of each character that Postgres refuses."""
    return _UNFIT.sub("\ufffd", value)


def json(value: Any) -> Any:
    """Return ``value`` as JSON that Postgres takes.

    NaN and the infinities become the strings ``NaN``, ``Infinity`` and ``-Infinity``; sets and tuples
    become lists; what JSON does not know becomes its text.
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
