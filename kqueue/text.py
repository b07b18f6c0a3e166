"""Cleaning of untrusted text before it is shown.

Sources, labels, logs and messages can come from a candidate. None of them can move a terminal's cursor, imitate the
program that shows them, or contain invisible text.
"""

from __future__ import annotations

import re
import unicodedata
from datetime import datetime
from importlib import import_module
from typing import Final

#: Unicode categories that are escaped: controls, formatting (which can reverse text), surrogates, private use,
#: unassigned, and line and paragraph separators.
_UNSAFE: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
#: Positions before text that a spreadsheet would read as a formula: at the beginning, and after each semicolon, tab or
#: line feed, because spreadsheets can split cells there. White space and quotation marks before the sign are skipped.
#: A text that begins with a tab or a line feed counts as a formula too.
_FORMULA: Final = re.compile(r"""^(?= *[\t\n])|(?:^|(?<=[;\t\n]))(?=(?:[^\S\t\n]|")*[=+\-@\uff1d\uff0b\uff0d\uff20])""")
#: Maximum number of cached characters, of the million that exist.
_KEPT: Final = 4096


class InNotebooks:
    """A mixin for types that :mod:`kqueue.notebook` shows."""

    def _repr_html_(self) -> str:
        # By name, because that module imports these types.
        return import_module("kqueue.notebook").to_html(self)


def clean(value: object) -> str:
    """Return ``value`` as text, with all control characters except line feeds and tabs escaped."""
    return str(value).translate(_SHOWN)


def one_line(value: object) -> str:
    """Return ``value`` as clean text on one line. Each run of white space becomes one space."""
    return " ".join(clean(value).split())


def short(value: object, most: int = 160) -> str:
    """Return ``value`` as clean text on one line, which is cut after a word, with a mark, to ``most`` characters."""
    line = "" if value is None else one_line(value)
    return line if len(line) <= most else f"{line[:most].rsplit(' ', 1)[0][: most - 1]}…"


def cell(value: object) -> str:
    """Return a value for a cell. An apostrophe precedes text that a spreadsheet would read as a formula."""
    match value:
        case None:
            return ""
        case datetime():
            return value.isoformat()
        case bool() | int() | float():
            return str(value)
        case _:
            return _FORMULA.sub("'", clean(value))


class _Shown(dict[int, str]):
    """A cache from a character's code to its shown form, limited because a source can have a million characters."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        shown = char.encode("unicode_escape").decode("ascii") if _is_unsafe(char) else char
        if len(self) < _KEPT:
            self[code] = shown
        return shown


def _is_unsafe(char: str) -> bool:
    # Variation selectors are marks without a shape. The 256 of them can spell out an invisible text.
    return char not in "\n\t" and (
        unicodedata.category(char) in _UNSAFE or "\ufe00" <= char <= "\ufe0f" or "\U000e0100" <= char <= "\U000e01ef"
    )


_SHOWN: Final = _Shown()
