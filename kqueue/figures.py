"""Formats of figures, times and findings for people, and parsers of times and durations that users write."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from kqueue.errors import InvalidRequest
from kqueue.text import one_line, short

if TYPE_CHECKING:
    from kqueue.evidence import Finding, Provenance
    from kqueue.store.budgets import Budget

_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}

#: Units by the last word of a field's name.
UNITS: Final = {
    "bytes": "bytes", "gbs": "GB/s", "gflops": "GFLOP/s", "mhz": "MHz", "ms": "ms", "s": "s", "seconds": "s",
}  # fmt: skip


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested values by their paths, such as ``timing.calls``."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def caption(name: str) -> tuple[str, str]:
    """Return the caption and the unit of a field. Its name declares both: ``setup_ms`` is ``setup`` in ``ms``."""
    stem, _, last = name.rpartition("_")
    unit = UNITS.get(last, "") if stem else ""
    return (stem if unit else name).replace("_", " "), unit


def listed(fields: Iterable[tuple[str, object]]) -> Iterator[tuple[str, str]]:
    """Return the caption and the text, with its unit, of each value. A model of evidence is such an iterable."""
    return ((caption(name)[0], _in_words(value, caption(name)[1])) for name, value in fields if value not in (None, ""))


def _in_words(value: Any, unit: str) -> str:
    match value:
        case bool():
            return yes_no(value)
        case int() | float():
            return f"{value:.6g} {unit}".rstrip() if isinstance(value, float) else f"{value} {unit}".rstrip()
        case datetime():
            return moment(value)
        case Mapping():
            return ", ".join(f"{step(name)} {_in_words(each, unit)}" for name, each in value.items())
        case list() | tuple():
            return ", ".join(_in_words(each, "") for each in value) + f" {unit}".rstrip() if value else "none"
        case Iterable() if not isinstance(value, str):
            return "(" + "; ".join(f"{title} {text}" for title, text in listed(value)) + ")"
        case _:
            return str(value)


def milliseconds(value: float | None) -> str:
    """Format a time with four digits. Empty for None."""
    return "" if value is None else f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"


def brief(message: str | None, reused_from: UUID | str | None = None, *, most: int = 160) -> str:
    """Return a verdict's message for a row of a table, with its origin, without what all right kernels share."""
    own = re.sub(r"^right on \d+ input sets, \d+ of them hidden variants.*? each time(; )?", "", message or "")
    return f"reused from {reused_from!s:.8}. " * bool(reused_from) + short(own, most)


def gib(value: int) -> str:
    """Format bytes in GiB with one decimal."""
    return f"{value / (1 << 30):.1f}"


def ratio(value: float | None) -> str:
    """Format a speedup, such as ``1.83x``. Empty for None."""
    return "" if value is None else f"{value:.2f}x"


def is_noisy(interval: tuple[float | None, float | None] | None) -> bool:
    """Return True if the interval of a speedup is wider than a factor of 1.5. Such a speedup is noise."""
    return interval is not None and interval[1] is not None and interval[1] > 1.5 * (interval[0] or 0.0)


def speedup(value: float | None, interval: tuple[float | None, float | None] | None) -> str:
    """Format a speedup with its interval. A noisy one has one digit: ``about 2x, too noisy (1.10x to 3.60x)``."""
    about = f"about {float(f'{value:.1g}'):g}x, too noisy" if value is not None and is_noisy(interval) else ratio(value)
    return about if interval is None or None in interval else f"{about} ({ratio(interval[0])} to {ratio(interval[1])})"


def yes_no(value: bool | None) -> str:
    """Return ``yes`` or ``no``. Empty for None."""
    return "" if value is None else "yes" if value else "no"


def age(since: datetime) -> str:
    """Format the time since ``since`` in its largest unit: ``12s``, ``3m``, ``5h``, ``2d``."""
    seconds = max(0.0, (datetime.now(UTC) - since).total_seconds())
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def step(name: str | None) -> str:
    """Return a step of an evaluation as text, such as ``wait for device``. Empty for None."""
    return "" if name is None else name.replace("_", " ")


def budget(known: Budget | None) -> str:
    """Return the used and remaining budget in one line, with the consequence of using it up. Empty for None."""
    if known is None:
        return ""
    used = f"{known.used_s:.0f} of {known.seconds:g} s in {known.window_s:g} s, {known.left_s:.0f} s left"
    return f"{used}, then {known.then}"


def moment(value: datetime | None) -> str:
    """Format a time in UTC to the second. Empty for None."""
    return "" if value is None else value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def provenance(found: Provenance | None) -> str:
    """Return the origin of the code that worked on the GPU, in one line. Empty if it is unknown."""
    if found is None:
        return ""
    libraries = [kernel.name for kernel in found.library]
    return ("decoy: " if found.decoy else "") + found.why + _some(found.own, "own") + _some(libraries, "library")


def _some(names: Sequence[str], title: str) -> str:
    """Return the first three names of kernels, shortened. The JSON form has all names in full."""
    more = f" and {len(names) - 3} more" * (len(names) > 3)
    return f"; {title}: {', '.join(short(name, 60) for name in names[:3])}{more}" if names else ""


def finding(found: Finding) -> str:
    """Return a finding in one line: severity, rule, author of the rule, location, meaning and matched text."""
    location = "" if found.line is None else f", line {found.line}"
    whose = "" if found.by == "kqueue" else f" ({found.by})"
    matched = f": {found.evidence}" if found.evidence else ""
    return one_line(f"{found.severity}: {found.rule}{whose}{location}: {found.meaning}{matched}")


def duration(value: str) -> timedelta | None:
    """Return the duration that ``30m``, ``2h`` or ``7d`` stands for, or None for another text or too long a time."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", value)
    try:
        return None if match is None else timedelta(**{_UNITS[match[2]]: float(match[1])})
    except OverflowError:
        return None


def since(value: str, option: str = "--since") -> datetime:
    """Return the time of an option: an age such as ``2h``, or a date or time, in UTC unless it has a zone."""
    try:
        if (passed := duration(value)) is not None:
            return datetime.now(UTC) - passed
        named = datetime.fromisoformat(value)
        return (named if named.tzinfo else named.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise InvalidRequest(
            f"{option} {value}: write an age such as 30m, 2h, 7d, or a date such as 2026-01-31"
        ) from None
