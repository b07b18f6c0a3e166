"""What charts are drawn from. Any text in it may be foreign: it is escaped and shortened when it is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from kqueue.categories import Blame, Category


@dataclass(frozen=True, slots=True)
class Point:
    """A candidate.

    Attributes:
        at: when its verdict was reached.
        speedup: how many times as fast as the baseline it is; None if it was not timed.
        blame: of its verdict: ``none`` if it passed.
        evaluation_id: its evaluation.
    """

    at: datetime
    speedup: float | None
    blame: Blame
    evaluation_id: UUID

    @property
    def passed(self) -> bool:
        """True if it is right."""
        return self.blame is Blame.NONE


@dataclass(frozen=True, slots=True)
class BestSoFar:
    """The speedup of the best right kernel over time, and every candidate as a point."""

    title: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Bar:
    """A kernel of a leaderboard.

    Attributes:
        label: what it is called.
        speedup: how many times as fast as the baseline it is.
        low, high: the speedup at the third and the first quartile of its times; None where they are not known.
        note: what is said beside it, such as the device.
    """

    label: str
    speedup: float
    low: float | None = None
    high: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Leaderboard:
    """Speedups with their spread, the best first."""

    title: str
    bars: Sequence[Bar]


@dataclass(frozen=True, slots=True)
class Stack:
    """How many evaluations of one group came to each category."""

    label: str
    counts: Mapping[Category, int]


@dataclass(frozen=True, slots=True)
class Categories:
    """Each group as one bar, with its categories in it side by side in the order of their blame."""

    title: str
    stacks: Sequence[Stack]


@dataclass(frozen=True, slots=True)
class FastP:
    """KernelBench's fast_p over p: the share of problems with a kernel that is right and more than p times as fast.

    Attributes:
        title: the title.
        speedups: that of the best right kernel, of each problem that has one; 0 where none was timed.
        problems: how many problems there are, with those that have no right kernel.
    """

    title: str
    speedups: Sequence[float]
    problems: int


@dataclass(frozen=True, slots=True)
class Spread:
    """How long the timed calls of something took, in milliseconds.

    A fleet keeps no single calls, but these figures of them.
    """

    label: str
    min_ms: float
    q1_ms: float
    median_ms: float
    q3_ms: float
    max_ms: float
    count: int


@dataclass(frozen=True, slots=True)
class Times:
    """Where the timed calls of a kernel lie, beside those of its baseline."""

    title: str
    spreads: Sequence[Spread]


@dataclass(frozen=True, slots=True)
class Curve:
    """A run of a search.

    Attributes:
        label: the run's name.
        points: number and score of each proposal that has a score, in order.
        tests: number of proposals and score, of the best kernel judged once more.
    """

    label: str
    points: Sequence[tuple[int, float]]
    tests: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True, slots=True)
class SearchCurve:
    """The scores of runs and the best so far over proposals. ``metric`` is what the scores are."""

    title: str
    metric: str
    curves: Sequence[Curve]


@dataclass(frozen=True, slots=True)
class Importances:
    """How much each name of a tuning run decides: shares of 1 by name, the largest first."""

    title: str
    shares: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Spot:
    """A kernel on a roofline.

    Attributes:
        label: what it is called.
        flops_per_byte: its operations for each byte that it moves.
        gflops: its operations, in 10^9 a second.
    """

    label: str
    flops_per_byte: float
    gflops: float


@dataclass(frozen=True, slots=True)
class Roofline:
    """How near kernels come to what a GPU can do, by how much they compute for each byte.

    Attributes:
        title: the title.
        peak_gbs: the memory's peak, in 10^9 bytes a second.
        peak_gflops: the processors' peak, in 10^9 operations a second.
        spots: the kernels, the longest first.
    """

    title: str
    peak_gbs: float
    peak_gflops: float
    spots: Sequence[Spot]


Chart = BestSoFar | Leaderboard | Categories | FastP | Times | SearchCurve | Importances | Roofline
