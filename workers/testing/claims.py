"""Checks of messages from a process of tests before they reach pytest. Foreign code on another host can forge them.

pytest and its plugins trust a report. A malformed report ends the whole run, and a text can contain control sequences
of the terminal.
"""

from __future__ import annotations

import math
import re
import warnings
from typing import Any, Final, TypeGuard, cast

import pytest

from kqueue.text import clean

_PHASES: Final = ("setup", "call", "teardown")
#: Form of the outcomes that plugins define.
_OUTCOME: Final = re.compile(r"[A-Za-z_][\w-]{0,31}", re.ASCII)
#: Keys that the terminal's reporter uses for other objects than tests' outcomes, or treats specially.
_TAKEN: Final = frozenset({"deselected", "error", "warnings", "xfailed", "xpassed"})
#: The field that pytest sets itself, and the field that marks a report of pytest-xdist.
_ID: Final = "_id"
_XDIST: Final = "node"
#: Bound on statuses and line numbers.
_MOST: Final = 1 << 31
#: The escape sequences that colour a text, as in reports with ``--color=yes``.
_COLOUR: Final = re.compile(r"(\x1b\[[\d;:]{0,64}m)", re.ASCII)
_RETURN: Final = re.compile(r"\r\n?")


def is_number(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer in the range of statuses and line numbers. JSON's true is not one."""
    return type(value) is int and abs(value) < _MOST


def outcome(value: object) -> bool:
    """Return whether a value can be a report's outcome, of pytest or of a plugin."""
    return isinstance(value, str) and value not in _TAKEN and _OUTCOME.fullmatch(value) is not None


def check_report(report: pytest.TestReport) -> None:
    """Raise an exception if a report of received data is not of a test's phase, or if pytest cannot process it."""
    held: dict[str, Any] = vars(report)
    hides = [name for name in held if hasattr(type(report), name) or name == _XDIST]
    if hides:
        raise ValueError(f"a report with a field {hides[0]!r}")
    longrepr, user_properties = held["longrepr"], held["user_properties"]
    crash = getattr(longrepr, "reprcrash", None)
    sound = (
        report.when in _PHASES
        and outcome(report.outcome)
        and all(_finite(held.get(name, 0)) for name in ("duration", "start", "stop"))
        and isinstance(report.keywords, dict)
        and isinstance(held.get("wasxfail", ""), str)
        and all(map(_texts, report.sections))
        and all(map(_pair, user_properties))
        and (longrepr is None or isinstance(longrepr, str | tuple) or hasattr(longrepr, "toterminal"))
        and (report.outcome != "failed" or longrepr is not None)
        and (report.outcome != "skipped" or "wasxfail" in held or _skip(longrepr))
        and (crash is None or isinstance(crash.message, str))
    )
    if not sound:
        raise ValueError("not the report of a test")
    # Each of these raises if a text in it has another type.
    _ = report.longreprtext, str(crash), report.head_line


def with_tuples(data: dict[str, Any]) -> dict[str, Any]:
    """Return a report's data with the tuples restored that JSON has turned into lists."""
    if _ID in data or _XDIST in data:
        raise ValueError("a report with fields of pytest's own")
    changed = dict(data)
    for name in ("location", "longrepr"):
        if isinstance(data.get(name), list):
            changed[name] = tuple(data[name])
    for name in ("sections", "user_properties"):
        changed[name] = [tuple(pair) for pair in data.get(name) or ()]
    return changed


def warning(said: dict[str, Any]) -> warnings.WarningMessage:
    """Return a warning that another process has caught.

    The message must include the line of source. Otherwise pytest would read it from a local file whose name foreign
    code can choose, such as a pipe, a device, or a private file.
    """
    match said:
        case {"module": str(module), "name": str(name), "words": str(text), "file": str(file), "source": str(source)}:
            line = said["line"]
        case _:
            raise ValueError("a warning with missing fields")
    if not is_number(line):
        raise ValueError("a warning without a line number")
    kind = cast("type[Warning]", type(name, (Warning,), {"__module__": module}))
    return warnings.WarningMessage(kind(text), kind, file, line, line=source)


def cleaned(word: dict[str, Any]) -> dict[str, Any]:
    """Return a message with texts that are safe for a terminal, except node ids, which identify tests."""
    safe = shown(word)
    for given, made in ((word, safe), (word.get("data"), safe.get("data"))):
        if isinstance(given, dict) and "nodeid" in given:
            made["nodeid"] = given["nodeid"]
    return safe


def shown(value: Any) -> Any:
    """Return a value with texts that are safe for a terminal (:mod:`kqueue.text`). Colours are kept.

    A text that overwrites its line, such as a progress bar, becomes several lines.
    """
    match value:
        case str():
            parts = _COLOUR.split(_RETURN.sub("\n", value))
            return "".join(part if number % 2 else clean(part) for number, part in enumerate(parts))
        case dict():
            return {shown(name): shown(inner) for name, inner in cast("dict[str, Any]", value).items()}
        case list():
            return [shown(inner) for inner in cast("list[Any]", value)]
        case _:
            return value


def _finite(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(cast("float", value))


def _pair(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str)


def _texts(value: object) -> bool:
    match value:
        case (str(), str()):
            return isinstance(value, tuple)
        case _:
            return False


def _skip(value: object) -> bool:
    match value:
        case (str(), int() | None, str()):
            return isinstance(value, tuple)
        case _:
            return False
