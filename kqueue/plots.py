"""The pictures of a problem, a batch and an evaluation, by kind, for `kqueue plot` and the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

if TYPE_CHECKING:
    from kqueue import charts
    from kqueue.evidence import Measurement

#: The function that calls a report.
Reader = Callable[..., Any]
#: Maximum number of kernels on a leaderboard, so that it stays readable.
_BARS: Final = 20


class Kinds(StrEnum):
    """The kinds of pictures."""

    BEST = "best"
    LEADERBOARD = "leaderboard"
    CATEGORIES = "categories"
    FAST_P = "fast-p"
    CURVE = "curve"
    IMPORTANCES = "importances"
    TIMES = "times"
    ROOFLINE = "roofline"


#: The name for files, and the function that makes each chart.
Plots = tuple[str, Mapping[Kinds, "Callable[[], charts.Chart]"]]


def of_problem(read: Reader, key: str) -> Plots:
    """Return the pictures of the problem with this hash."""
    from kqueue import charts, examinations
    from kqueue.store import reports
    from kqueue.store.reports import boards

    stored = read(reports.problem, key)
    name = stored.problem_label or key[:12]
    points = read(reports.best_so_far, key)

    bars = [
        charts.Bar(
            one.kernel_label or one.kernel_hash[:12],
            one.speedup,
            one.speedup_low,
            one.speedup_high,
            f"{one.backend}, {one.precision}, {one.device or 'unknown'}",
        )
        for one in read(boards.leaderboard, key, limit=_BARS)
        if one.speedup is not None
    ]
    available: dict[Kinds, Callable[[], charts.Chart]] = {
        Kinds.BEST: lambda: charts.BestSoFar(
            f"Best so far: {name}", [charts.Point(one.at, one.speedup, one.blame, one.evaluation_id) for one in points]
        ),
        Kinds.LEADERBOARD: lambda: charts.Leaderboard(f"Fastest kernels: {name}", bars),
        Kinds.CATEGORIES: lambda: charts.Categories(
            f"Outcomes: {name}", [charts.Stack(name, read(reports.outcomes, problem_hash=key))]
        ),
    }
    if not bars:
        del available[Kinds.LEADERBOARD]
    if profiles := {one.name: one.profile for one in read(boards.profiled, key)}:
        available[Kinds.ROOFLINE] = lambda: examinations.roofline(f"Roofline: {name}", profiles)
    return _with_id(stored.problem_label, key), available


def of_batch(read: Reader, key: str) -> Plots:
    """Return the pictures of the batch with this name."""
    from kqueue import charts
    from kqueue.store import reports

    def fast_p() -> charts.Chart:
        result = read(reports.fast_p, key)
        return charts.FastP(f"fast_p: {key}", result.speedups, result.problems)

    return key, {
        Kinds.CATEGORIES: lambda: charts.Categories(
            f"Outcomes: {key}", [charts.Stack(key, read(reports.outcomes, batch=key))]
        ),
        Kinds.FAST_P: fast_p,
    }


def of_evaluation(read: Reader, key: str) -> Plots:
    """Return the pictures of the evaluation with this id."""
    from kqueue import charts, examinations
    from kqueue.evidence import Measurement
    from kqueue.store import reports

    detail = read(reports.show, UUID(key))
    verdict = detail.verdict
    timed: list[tuple[str, Measurement | None]] = []
    if verdict is not None and verdict.runtime is not None:
        compiled = verdict.evidence.compiled_baseline
        timed = [
            (detail.kernel_label or "the kernel", verdict.runtime),
            ("the reference", verdict.baseline),
            ("the reference, compiled", compiled if isinstance(compiled, Measurement) else None),
        ]
    name = detail.problem_label or key[:8]
    available: dict[Kinds, Callable[[], charts.Chart]] = {}
    if timed:
        available[Kinds.TIMES] = lambda: charts.Times.of(f"Timed calls: {name}", timed)
    profile = verdict and verdict.evidence.profile
    if profile:
        label = detail.kernel_label or "the kernel"
        available[Kinds.ROOFLINE] = lambda: examinations.roofline(f"Roofline: {name}", {label: profile})
    return _with_id(detail.kernel_label, key), available


def _with_id(label: str | None, key: str) -> str:
    """Return a name for files: a label, and the first digits of a hash or id because labels are not unique."""
    return f"{label[:48]}-{key[:8]}" if label else key[:12]
