"""How two evaluations differ, for `kqueue diff` as for the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kqueue.unified import unified

if TYPE_CHECKING:
    from kqueue.store.reports import Detail

#: The most lines of two problems and two kernels, together, that a server compares: in a second or two.
_LINES: Final = 200_000


def of_sources(a: Detail, b: Detail, *, context: int = 3) -> list[str]:
    """Return the lines of a unified diff of two evaluations' problems and kernels; none where they are the same.

    Args:
        a: the first evaluation.
        b: the second.
        context: lines round each change.
    """
    return [
        line
        for what in ("problem", "kernel")
        for line in unified(
            getattr(a, what).splitlines(),
            getattr(b, what).splitlines(),
            _named(a, what),
            _named(b, what),
            context=context,
        )
    ]


def are_too_long(a: Detail, b: Detail) -> bool:
    """Return True if the sources have too many lines for a server that others use too.

    `kqueue diff` compares sources of any length, for whoever waits for it.
    """
    return sum(len(getattr(detail, what).splitlines()) for detail in (a, b) for what in ("problem", "kernel")) > _LINES


def of_times(a: Detail, b: Detail) -> str:
    """Return which of two kernels is faster, in words; empty where their times cannot be compared."""
    one, other = (detail.verdict and detail.verdict.runtime for detail in (a, b))
    if not one or not other or a.problem_hash != b.problem_hash or min(one.median_ms, other.median_ms) <= 0:
        return ""
    if a.verdict and b.verdict and _device(a) != _device(b):
        return "they were timed on devices of other models"
    ratio = one.median_ms / other.median_ms
    if one.q1_ms <= other.q3_ms and other.q1_ms <= one.q3_ms:
        return f"the second takes {1 / ratio:.3g} of the first's time; their quartiles overlap"
    return f"the second is {ratio:.3g}x as fast as the first"


def _named(detail: Detail, what: str) -> str:
    label = getattr(detail, f"{what}_label") or getattr(detail, f"{what}_hash")[:12]
    return f"{what} {label} of {str(detail.evaluation_id)[:8]}"


def _device(detail: Detail) -> str | None:
    return detail.verdict.environment.device if detail.verdict and detail.verdict.environment else None
