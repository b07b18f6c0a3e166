"""The data of charts. Any text in it can be untrusted. It is escaped and shortened when it is drawn."""

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
        at: time of its verdict.
        speedup: the baseline's time divided by the candidate's, or None if it was not timed.
        blame: the blame of its verdict, ``none`` if it passed.
    """

    at: datetime
    speedup: float | None
    blame: Blame
    evaluation_id: UUID


@dataclass(frozen=True, slots=True)
class BestSoFar:
    """The speedup of the best correct kernel over time, and every candidate as a point."""

    title: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Bar:
    """A kernel of a leaderboard.

    Attributes:
        speedup: the baseline's time divided by the kernel's.
        low, high: the speedup at the third and the first quartile of its times, or None where they are unknown.
        note: text next to the bar, such as the device.
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
    """The number of evaluations of one group in each category."""

    label: str
    counts: Mapping[Category, int]


@dataclass(frozen=True, slots=True)
class Categories:
    """A bar for each group, divided into its categories in the order of their blame."""

    title: str
    stacks: Sequence[Stack]


@dataclass(frozen=True, slots=True)
class FastP:
    """KernelBench's fast_p over p: the share of problems with a correct kernel that is more than p times as fast.

    Attributes:
        speedups: the speedup of the best correct kernel of each problem that has one, or 0 where none was timed.
        problems: number of problems, including those without a correct kernel.
    """

    title: str
    speedups: Sequence[float]
    problems: int


@dataclass(frozen=True, slots=True)
class Spread:
    """Statistics of timed calls in milliseconds. A fleet does not record single calls."""

    label: str
    min_ms: float
    q1_ms: float
    median_ms: float
    q3_ms: float
    max_ms: float
    count: int


@dataclass(frozen=True, slots=True)
class Times:
    """The distribution of a kernel's timed calls, and of its baseline's."""

    title: str
    spreads: Sequence[Spread]


@dataclass(frozen=True, slots=True)
class Curve:
    """A run of a search.

    Attributes:
        points: number and score of each proposal that has a score, in order.
        tests: number of proposals so far and score, for each test of the best kernel.
    """

    label: str
    points: Sequence[tuple[int, float]]
    tests: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True, slots=True)
class SearchCurve:
    """The scores of runs in a metric, and the best so far, over proposals."""

    title: str
    metric: str
    curves: Sequence[Curve]


@dataclass(frozen=True, slots=True)
class Importances:
    """The importance of each name of a tuning run: shares of 1 by name, the largest first."""

    title: str
    shares: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Spot:
    """A kernel on a roofline.

    Attributes:
        flops_per_byte: operations for each byte moved.
        gflops: throughput in 10^9 operations a second.
    """

    label: str
    flops_per_byte: float
    gflops: float


@dataclass(frozen=True, slots=True)
class Roofline:
    """The throughput of kernels compared with a GPU's limits, over their operations for each byte.

    Attributes:
        peak_gbs: peak memory bandwidth in 10^9 bytes a second.
        peak_gflops: peak throughput in 10^9 operations a second.
        spots: the kernels, the longest first.
    """

    title: str
    peak_gbs: float
    peak_gflops: float
    spots: Sequence[Spot]


Chart = BestSoFar | Leaderboard | Categories | FastP | Times | SearchCurve | Importances | Roofline
