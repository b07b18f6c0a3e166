"""The differences between two evaluations, for `kqueue diff` and the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kqueue.unified import unified

if TYPE_CHECKING:
    from kqueue.store.reports import Detail

#: Maximum total number of lines of two problems and two kernels that a server compares, which takes a second or two.
_LINES: Final = 200_000


def of_sources(a: Detail, b: Detail, *, context: int = 3) -> list[str]:
    """Return the lines of a unified diff of two evaluations' problems and kernels, or none if they are equal."""
    return [
        line
        for part in ("problem", "kernel")
        for line in unified(
            getattr(a, part).splitlines(),
            getattr(b, part).splitlines(),
            _named(a, part),
            _named(b, part),
            context=context,
        )
    ]


def are_too_long(a: Detail, b: Detail) -> bool:
    """Return True if the sources have too many lines for a shared server. `kqueue diff` has no such limit."""
    return sum(len(getattr(detail, part).splitlines()) for detail in (a, b) for part in ("problem", "kernel")) > _LINES


def of_times(a: Detail, b: Detail) -> str:
    """Return a sentence on which of two kernels is faster. Empty if their times cannot be compared."""
    one, other = (detail.verdict and detail.verdict.runtime for detail in (a, b))
    if not one or not other or a.problem_hash != b.problem_hash or min(one.median_ms, other.median_ms) <= 0:
        return ""
    if a.verdict and b.verdict and _device(a) != _device(b):
        return "they were timed on different models of devices"
    ratio = one.median_ms / other.median_ms
    if one.q1_ms <= other.q3_ms and other.q1_ms <= one.q3_ms:
        return f"the second takes {1 / ratio:.3g} of the first's time, with overlapping quartiles"
    return f"the second is {ratio:.3g}x as fast as the first"


def _named(detail: Detail, part: str) -> str:
    label = getattr(detail, f"{part}_label") or getattr(detail, f"{part}_hash")[:12]
    return f"{part} {label} of {str(detail.evaluation_id)[:8]}"


def _device(detail: Detail) -> str | None:
    return detail.verdict.environment.device if detail.verdict and detail.verdict.environment else None
