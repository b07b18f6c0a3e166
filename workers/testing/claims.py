"""What a process of tests says, before pytest is told of it: foreign code may have said it, on another host.

pytest and its plugins believe a report: one of a wrong form ends the whole run, and a text may command a terminal.
"""

from __future__ import annotations

import math
import re
import warnings
from typing import Any, Final, TypeGuard, cast

import pytest

from kqueue.text import clean

_PHASES: Final = ("setup", "call", "teardown")
_OWN: Final = ("passed", "failed", "skipped")
#: The outcomes of plugins have names like this one.
_OUTCOME: Final = re.compile(r"[A-Za-z_][\w-]{0,31}", re.ASCII)
#: By these the terminal's reporter keeps what is no test's outcome, or what it takes apart in ways of its own.
_TAKEN: Final = frozenset({"deselected", "error", "warnings", "xfailed", "xpassed"})
#: What pytest sets itself, and what it takes for a sign of pytest-xdist.
_ID: Final = "_id"
_XDIST: Final = "node"
#: No status or number of a line is larger.
_MOST: Final = 1 << 31
#: What colours a text, as reports are with ``--color=yes``.
_COLOUR: Final = re.compile(r"(\x1b\[[\d;:]{0,64}m)", re.ASCII)
_RETURN: Final = re.compile(r"\r\n?")


def is_number(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number such as a status or a line's; JSON's true is none."""
    return type(value) is int and abs(value) < _MOST


def outcome(value: object) -> bool:
    """Return whether a value can be a report's outcome: one of pytest's, or of a plugin's."""
    return isinstance(value, str) and value not in _TAKEN and _OUTCOME.fullmatch(value) is not None


def check_report(report: pytest.TestReport) -> None:
    """Check what pytest has made of a report's data.

    Raises:
        Exception: it is not the report of a phase of a test, or holds what pytest cannot work with.
    """
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
        raise ValueError("a report of no test")
    # Each of these fails if a text in it is none.
    _ = report.longreprtext, str(crash), report.head_line


def with_tuples(data: dict[str, Any]) -> dict[str, Any]:
    """Return a report's data with tuples where reports have some, which JSON has made lists.

    Raises:
        Exception: they are none.
    """
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

    Its line of source is what that process has found. Otherwise it would be looked for in a file here, by a name that
    foreign code may have chosen: of a pipe, of a device, or of what is nobody else's business.

    Raises:
        Exception: it is none.
    """
    match said:
        case {"module": str(module), "name": str(name), "words": str(words), "file": str(file), "source": str(source)}:
            line = said["line"]
        case _:
            raise ValueError("a warning that lacks something")
    if not is_number(line):
        raise ValueError("a warning of no line")
    kind = cast("type[Warning]", type(name, (Warning,), {"__module__": module}))
    return warnings.WarningMessage(kind(words), kind, file, line, line=source)


def cleaned(word: dict[str, Any]) -> dict[str, Any]:
    """Return a word with its texts fit for a terminal, but for the names that it and its report are known by."""
    found = shown(word)
    for given, made in ((word, found), (word.get("data"), found.get("data"))):
        if isinstance(given, dict) and "nodeid" in given:
            made["nodeid"] = given["nodeid"]
    return found


def shown(value: Any) -> Any:
    """Return a value with texts that are fit for a terminal (:mod:`kqueue.text`), in colour where they are.

    What overwrites a line, such as a bar of progress, becomes a line of its own.
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
