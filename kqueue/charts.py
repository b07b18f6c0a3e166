"""Pictures of a fleet's results, drawn from plain data as SVG or PNG, in a light or a dark theme.

A chart is a dataclass, independent of the database. Any text in it can be untrusted. It is escaped and shortened when
it is drawn. :func:`render` uses matplotlib's objects instead of its global state, which threads would share. The same
chart gives the same bytes.
"""

from __future__ import annotations

import threading
import warnings
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from io import BytesIO
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, Self
from uuid import UUID

from kqueue.categories import CATEGORIES, Blame, Category
from kqueue.errors import ConfigError
from kqueue.text import one_line, short

if TYPE_CHECKING:
    from kqueue.evidence import Measurement

#: Maximum number of characters of a label.
_LABEL: Final = 36
#: Maximum number of characters of a title.
_TITLE: Final = 80
#: Number of points from which they are drawn as one image within an SVG, to save megabytes.
_POINTS: Final = 2000
#: Maximum number of kernels on a roofline, so that they stay distinguishable.
_SPOTS: Final = 7
_WIDTH_INCHES: Final = 8.0
#: Maximum number of revisions whose names are written below a chart.
_TICKS: Final = 24
#: Colour, mark, hatch and words of each blame, so that blames are distinguishable without colour.
_BLAMES: Final = {
    Blame.NONE: ("C2", "o", "", "passed"),
    Blame.CANDIDATE: ("C1", "x", "///", "the kernel failed"),
    Blame.PROBLEM: ("C3", "^", "...", "the problem failed"),
    Blame.FLEET: ("C4", "s", "xxx", "the fleet failed"),
    Blame.NOBODY: ("C6", "D", "--", "cancelled, expired or in need of a GPU"),
}
#: Marks and lines of several curves in one picture.
_CURVE_MARKS: Final = ("o", "s", "^", "D", "v", "P", "*")
_CURVE_LINES: Final = ("-", "--", "-.", ":")
#: The settings with the theme's colours of the background, of text and of secondary text.
_PAPER: Final = "axes.facecolor"
_INK: Final = "text.color"
_QUIET: Final = "axes.edgecolor"
_DOTS_PER_INCH: Final = 144
#: Lock for matplotlib's settings and the warning filters, which are global.
_GLOBALS: Final = threading.Lock()


class Theme(StrEnum):
    """The background."""

    LIGHT = "light"
    DARK = "dark"


class Form(StrEnum):
    """The formats of pictures, named by their file endings."""

    SVG = "svg"
    PNG = "png"


#: Background, text, secondary text, grid lines.
_INKS: Final = {
    Theme.LIGHT: ("#ffffff", "#1f2933", "#5f6b7a", "#e3e7ec"),
    Theme.DARK: ("#12161c", "#e6eaf0", "#9aa7b8", "#2a313b"),
}
#: Okabe's and Ito's colours, which all people can distinguish, darker or lighter for the background.
_COLOURS: Final = {
    Theme.LIGHT: ("#0072b2", "#d55e00", "#009e73", "#b4548d", "#b8860b", "#3a9bd9", "#4d4d4d"),
    Theme.DARK: ("#56b4e9", "#f0883e", "#2fc79b", "#e08fc0", "#f0c94a", "#8ea8ff", "#b0b0b0"),
}


@dataclass(frozen=True, slots=True)
class Point:
    """A candidate at the time of its verdict. The speedup is None if it was not timed."""

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
    """A kernel of a leaderboard. ``low`` and ``high`` are the speedups at the third and first quartile of its times."""

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

    @classmethod
    def of(cls, title: str, times: Iterable[tuple[str, Measurement | None]]) -> Self:
        """Return the distributions of the measurements that exist."""
        spreads = [
            Spread(label, one.min_ms, one.q1_ms, one.median_ms, one.q3_ms, one.max_ms, one.count)
            for label, one in times
            if one is not None
        ]
        return cls(title, spreads)


@dataclass(frozen=True, slots=True)
class Curve:
    """A run of a search: its proposals' numbers and scores, and for tests the number of proposals and the score."""

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
    """A kernel on a roofline: operations for each byte moved, and throughput in 10^9 operations a second."""

    label: str
    flops_per_byte: float
    gflops: float


@dataclass(frozen=True, slots=True)
class Roofline:
    """The throughput of kernels, the longest first, compared with a GPU's limits, over operations for each byte."""

    title: str
    peak_gbs: float
    peak_gflops: float
    spots: Sequence[Spot]


@dataclass(frozen=True, slots=True)
class Claims:
    """Published speedups of kernels and the measured ones, by result."""

    title: str
    groups: Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Line:
    """The times of a kernel's revisions in one environment.

    Attributes:
        times: numbers of revisions with the median in milliseconds, and how far its interval reaches below and above.
        failed: numbers of revisions that failed.
        began, change: the place before which an earlier environment was used, and the difference, or nothing.
    """

    label: str
    times: Sequence[tuple[int, float, float, float]]
    failed: Sequence[int] = ()
    began: float = 0.0
    change: str = ""


@dataclass(frozen=True, slots=True)
class History:
    """The times of a kernel over its revisions, a line for each environment."""

    title: str
    revisions: Sequence[str]
    lines: Sequence[Line]


Chart = BestSoFar | Leaderboard | Categories | FastP | Times | SearchCurve | Importances | Roofline | Claims | History


def render(chart: Chart, *, theme: Theme = Theme.LIGHT, form: Form = Form.SVG) -> bytes:
    """Draw a chart. The same chart gives the same bytes under one version of matplotlib.

    If the chart is empty, the picture says so. Raise ConfigError if matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"a picture needs matplotlib ({error}): pip install 'kqueue[plots]'") from None
    # Omit the date and the version of matplotlib.
    none: dict[str, Any] = {"Date": None, "Creator": None} if form is Form.SVG else {"Software": None}
    settings: Any = _settings(theme)
    held = BytesIO()
    with _GLOBALS, mpl.rc_context(settings), warnings.catch_warnings():
        # A label can have characters that no installed font has. They are drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure: Any = Figure(layout="constrained")
        axes = figure.subplots()
        axes.set_title(short(chart.title, _TITLE))
        if not _DRAWN[type(chart)](chart, axes):
            axes.set_axis_off()
            where = {"transform": axes.transAxes, "ha": "center", "va": "center"}
            axes.text(0.5, 0.5, "nothing to show yet", color=_of(_QUIET), **where)
        figure.savefig(held, format=form.value, dpi=_DOTS_PER_INCH, metadata=none | {"Title": one_line(chart.title)})
    return held.getvalue()


def _settings(theme: Theme) -> dict[str, Any]:
    """Return matplotlib's settings for a theme."""
    paper, text, secondary, grid = _INKS[theme]
    return {
        "axes.axisbelow": True,
        "axes.edgecolor": secondary,
        "axes.facecolor": paper,
        "axes.grid": True,
        "axes.labelcolor": secondary,
        "axes.prop_cycle": f"cycler(color={_COLOURS[theme]})",
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlecolor": text,
        "axes.titlelocation": "left",
        "axes.titlepad": 14,
        "axes.titlesize": 13,
        "axes.titleweight": "bold",
        "figure.constrained_layout.h_pad": 0.14,
        "figure.constrained_layout.w_pad": 0.14,
        "figure.facecolor": paper,
        "figure.figsize": (8.0, 4.5),
        "font.family": ["DejaVu Sans"],
        "font.size": 10,
        "grid.color": grid,
        "grid.linewidth": 0.8,
        "hatch.color": paper,
        "hatch.linewidth": 1.0,
        "legend.frameon": False,
        "legend.labelcolor": text,
        "savefig.facecolor": paper,
        # Ids within an SVG would be random.
        "svg.hashsalt": "kqueue",
        # Text stays text, for search and for screen readers.
        "svg.fonttype": "none",
        "text.color": text,
        # A dollar sign in a label does not begin a formula.
        "text.parse_math": False,
        "timezone": "UTC",
        "xtick.color": secondary,
        "ytick.color": secondary,
        "xtick.labelcolor": secondary,
        "ytick.labelcolor": text,
    }


def _best_so_far(chart: BestSoFar, axes: Any) -> bool:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter, date2num

    points = sorted(chart.points, key=lambda point: (point.at, point.evaluation_id))
    if not points:
        return False
    flat = len(points) > _POINTS
    began, first = points[0].at, float(date2num(points[0].at))

    def days(some: Iterable[Point]) -> array[float]:
        # An array, because matplotlib would check each item of a list of tens of thousands, more than once.
        return array("d", (first + (point.at - began).total_seconds() / 86400 for point in some))

    timed = [point for point in points if point.blame is Blame.NONE and point.speedup is not None]
    speedups = array("d", (point.speedup or 0.0 for point in timed))
    if timed:
        best = array("d", accumulate(speedups, max))
        axes.scatter(
            days(timed), speedups, s=26, marker="o", linewidths=0.6,
            color="C2", edgecolors=_of(_PAPER), alpha=0.75, label="passed",
            rasterized=flat,
        )  # fmt: skip
        # The best is drawn up to the last candidate of all.
        axes.step(
            days([*timed, points[-1]]), array("d", [*best, best[-1]]), where="post", color="C0",
            linewidth=2.2, label=f"best so far: {best[-1]:.2f}x",
        )  # fmt: skip
        axes.axhline(1.0, color=_of(_QUIET), linewidth=1, linestyle="--")
    # Candidates without a speedup are drawn at zero.
    top = max([1.0, *speedups])
    axes.set_ylim(-0.06 * top, 1.12 * top)
    for blame, (paint, mark, _, words) in _BLAMES.items():
        at_zero = [
            point for point in points if point.blame is blame and (blame is not Blame.NONE or point.speedup is None)
        ]
        if at_zero:
            name = "passed, not timed" if blame is Blame.NONE else words
            axes.scatter(
                days(at_zero), array("d", [0.0]) * len(at_zero), s=26, marker=mark, color=paint,
                alpha=0.75, linewidths=1.4, label=f"{name} ({len(at_zero)})", rasterized=flat,
            )  # fmt: skip
    locator = AutoDateLocator()
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    axes.set(xlabel="time of the verdict, UTC", ylabel="speedup")
    _legend(axes)
    return True


def _leaderboard(chart: Leaderboard, axes: Any) -> bool:
    if not chart.bars:
        return False
    positions = _rows(axes, [bar.label for bar in chart.bars])
    axes.barh(positions, [bar.speedup for bar in chart.bars], height=0.62, color="C0")
    for position, bar in enumerate(chart.bars):
        low, high = (bar.speedup if one is None else one for one in (bar.low, bar.high))
        if high > low:
            # The spread is drawn separately from the bar's end, because the median is not always in its middle.
            axes.plot([low, high], [position, position], color=_of(_INK), linewidth=1.6, marker="|", markersize=9)
        note = f"  {short(bar.note, _LABEL)}" if bar.note else ""
        axes.annotate(
            f"{bar.speedup:.2f}x{note}", (max(bar.speedup, high), position), xytext=(8, 0), textcoords="offset points",
            va="center",
        )  # fmt: skip
    axes.axvline(1.0, color=_of(_QUIET), linewidth=1, linestyle="--")
    widest = max(max(bar.speedup, bar.high or 0.0) for bar in chart.bars)
    axes.set_xlim(0, max(1.05, widest) * (1.45 if any(bar.note for bar in chart.bars) else 1.18))
    axes.set_xlabel("speedup over the baseline, and its quartiles")
    return True


def _categories(chart: Categories, axes: Any) -> bool:
    stacks = [stack for stack in chart.stacks if sum(stack.counts.values())]
    if not stacks:
        return False
    order = sorted(
        {category for stack in stacks for category, number in stack.counts.items() if number},
        key=lambda category: (list(Blame).index(category.blame), list(CATEGORIES).index(category)),
    )
    positions = _rows(
        axes,
        [f"{stack.label} ({sum(stack.counts.values())})" for stack in stacks],
        more=0.28 * ((len(order) + 1) // 2) + 0.3,
    )
    left = [0.0] * len(stacks)
    of_blame = Counter(category.blame for category in order)
    drawn = Counter[Blame]()
    for category in order:
        blame = category.blame
        paint, _, hatch, words = _BLAMES[blame]
        widths = [stack.counts.get(category, 0) for stack in stacks]
        # Categories of one blame are shades of its colour. Blames also differ in their hatches.
        shade = 1.0 - 0.6 * drawn[blame] / of_blame[blame]
        drawn[blame] += 1
        axes.barh(
            positions, widths, left=left, height=0.6, color=_mixed(paint, _of(_PAPER), shade),
            edgecolor=_of(_PAPER), linewidth=1, hatch=hatch,
            label=f"{category} ({sum(widths)}), {words}" if blame is not Blame.NONE
            else f"{category} ({sum(widths)})",
        )  # fmt: skip
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set(xlim=(0, max(left)), xlabel="evaluations")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.figure.legend(loc="outside lower left", ncols=2, handlelength=2.2, handleheight=1.1)
    return True


def _fast_p(chart: FastP, axes: Any) -> bool:
    if not chart.problems:
        return False
    speedups = sorted(chart.speedups)
    end = max(2.2, 1.1 * speedups[-1]) if speedups else 2.2
    # fast_p falls at each speedup: at p equal to it, the kernel is no longer more than p times as fast. A correct
    # kernel without a time counts only at p = 0.
    right = len(speedups)
    above: Callable[[float], float] = lambda p: (right - bisect_right(speedups, p)) / chart.problems  # noqa: E731
    steps = [0.0, *(one for one in speedups if one > 0), end]
    shares = [above(p) for p in steps]
    axes.step(steps, shares, where="post", color="C0", linewidth=2.2)
    axes.fill_between(steps, shares, step="post", color="C0", alpha=0.15)
    axes.plot([0], [right / chart.problems], marker="o", color="C2", markersize=8, clip_on=False, zorder=3)
    _annotate(axes, 0.0, right / chart.problems, f"correct: {right} of {chart.problems}")
    for p in (1.0, 2.0):
        axes.plot([p], [above(p)], marker="D", color="C1", markersize=6, zorder=3)
        _annotate(axes, p, above(p), f"fast_{p:g}: {above(p):.0%}")
    axes.set(xlim=(0, end), ylim=(0, 1.08), xlabel="p, the speedup to beat", ylabel="share of problems")
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0])
    return True


def _annotate(axes: Any, x: float, y: float, label: str) -> None:
    axes.annotate(label, (x, y), xytext=(9, 7), textcoords="offset points")


def _times(chart: Times, axes: Any) -> bool:
    if not chart.spreads:
        return False
    positions = _rows(axes, [one.label for one in chart.spreads], each=0.7)
    stats = [
        {"whislo": one.min_ms, "q1": one.q1_ms, "med": one.median_ms, "q3": one.q3_ms, "whishi": one.max_ms}
        for one in chart.spreads
    ]
    drawn = axes.bxp(
        stats, positions=positions, orientation="horizontal", widths=0.5, showfliers=False, patch_artist=True,
        manage_ticks=False,
        medianprops={"color": _of(_INK), "linewidth": 2}, whiskerprops={"color": _of(_QUIET), "linewidth": 1.4},
        capprops={"color": _of(_QUIET), "linewidth": 1.4}, boxprops={"edgecolor": _of(_PAPER)},
    )  # fmt: skip
    for position, (box, one) in enumerate(zip(drawn["boxes"], chart.spreads, strict=True)):
        box.set(facecolor=f"C{position}", hatch=("", "///", "...", "xxx")[position % 4])
        axes.annotate(
            f"{one.median_ms:.4g} ms, {one.count} calls", (one.median_ms, position), xytext=(0, 17),
            textcoords="offset points", ha="center", va="bottom", fontsize=9,
        )  # fmt: skip
    axes.set_ylim(len(stats) - 0.4, -0.75)
    axes.set_xlim(0, 1.06 * max(one.max_ms for one in chart.spreads) or 1.0)
    axes.set_xlabel("milliseconds a call: shortest, quartiles, median, longest")
    return True


def _search_curve(chart: SearchCurve, axes: Any) -> bool:
    curves = [curve for curve in chart.curves if curve.points or curve.tests]
    if not curves:
        return False
    for index, curve in enumerate(curves):
        paint, mark = f"C{index}", _CURVE_MARKS[index % len(_CURVE_MARKS)]
        numbers = [number for number, _ in curve.points]
        scores = [score for _, score in curve.points]
        axes.scatter(
            numbers, scores, s=22, marker=mark, color=paint, alpha=0.6, linewidths=0, rasterized=len(scores) > _POINTS
        )
        axes.step(
            numbers, list(accumulate(scores, max)), where="post", color=paint, linewidth=2.2,
            linestyle=_CURVE_LINES[index % len(_CURVE_LINES)], label=f"{short(curve.label, _LABEL)}: best so far",
        )  # fmt: skip
        if curve.tests:
            axes.plot(
                [number for number, _ in curve.tests], [score for _, score in curve.tests], "x", color=paint,
                markersize=8, markeredgewidth=2, label=f"{short(curve.label, _LABEL)}: best, judged again",
            )  # fmt: skip
    axes.set(xlabel="proposal", ylabel=short(chart.metric, _LABEL))
    axes.xaxis.get_major_locator().set_params(integer=True)
    _legend(axes)
    return True


def _importances(chart: Importances, axes: Any) -> bool:
    if not chart.shares:
        return False
    bars = axes.barh(_rows(axes, list(chart.shares)), list(chart.shares.values()), height=0.62, color="C0")
    axes.bar_label(bars, fmt="%.2f", padding=5)
    axes.set(xlim=(0, 1.1), xlabel="importance (PED-ANOVA)")
    return True


def _roofline(chart: Roofline, axes: Any) -> bool:
    spots = [spot for spot in chart.spots if spot.flops_per_byte > 0 and spot.gflops > 0][:_SPOTS]
    if not spots or min(chart.peak_gbs, chart.peak_gflops) <= 0:
        return False
    ridge = chart.peak_gflops / chart.peak_gbs
    low = min([ridge, *(spot.flops_per_byte for spot in spots)]) / 4
    high = max([ridge, *(spot.flops_per_byte for spot in spots)]) * 4
    axes.plot(
        [low, ridge, high], [low * chart.peak_gbs, chart.peak_gflops, chart.peak_gflops], color=_of(_QUIET),
        linewidth=2.2, label=f"peak: {chart.peak_gbs:.4g} GB/s, {chart.peak_gflops:.4g} GFLOP/s in fp32",
    )  # fmt: skip
    for index, spot in enumerate(spots):
        share = spot.gflops / min(chart.peak_gflops, spot.flops_per_byte * chart.peak_gbs)
        axes.plot(
            [spot.flops_per_byte], [spot.gflops], linestyle="", markersize=9, color=f"C{index}",
            marker=_CURVE_MARKS[index % len(_CURVE_MARKS)],
            label=f"{short(spot.label, _LABEL)}: {share:.0%} of the roof",
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="operations for each byte of memory traffic", ylabel="GFLOP/s")
    _legend(axes)
    return True


def _claims(chart: Claims, axes: Any) -> bool:
    values = [value for pairs in chart.groups.values() for pair in pairs for value in pair]
    if not values:
        return False
    axes.axline((1, 1), (2, 2), color=_of(_QUIET), linewidth=1.4, linestyle="--", label="as claimed")
    axes.axhline(1.0, color=_of(_QUIET), linewidth=0.8)
    for index, (label, pairs) in enumerate(chart.groups.items()):
        axes.plot(
            *zip(*pairs, strict=True), linestyle="", marker=_CURVE_MARKS[index % len(_CURVE_MARKS)], color=f"C{index}",
            alpha=0.75, label=f"{short(label, _LABEL)}: {len(pairs)}",
        )  # fmt: skip
    limits = min([0.5, *values]) / 1.3, max([2.0, *values]) * 1.3
    axes.set(xscale="log", yscale="log", xlim=limits, ylim=limits, xlabel="claimed speedup", ylabel="measured speedup")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}x")
    _legend(axes)
    return True


def _history(chart: History, axes: Any) -> bool:
    if not chart.lines:
        return False
    at_bottom = axes.get_xaxis_transform()
    for index, line in enumerate(chart.lines):
        paint = f"C{index}"
        mark, dashes = (each[index % len(each)] for each in (_CURVE_MARKS, _CURVE_LINES))
        numbers, medians, below, above = ([time[part] for time in line.times] for part in range(4))
        look = {"color": paint, "marker": mark, "linestyle": dashes, "capsize": 3, "label": short(line.label, _TITLE)}
        axes.errorbar(numbers, medians, yerr=[below, above], **look)
        axes.plot(line.failed, [0.03] * len(line.failed), "x", color=paint, markersize=8, transform=at_bottom)
        if line.change:
            axes.axvline(line.began, color=_of(_QUIET), linewidth=1.4, linestyle="--")
            side, off = ("left", 4) if 2 * line.began < len(chart.revisions) else ("right", -4)
            axes.annotate(
                "\n".join(short(one, _LABEL) for one in line.change.split(", ")), (line.began, 0.97),
                xycoords=at_bottom, xytext=(off, 0), textcoords="offset points", ha=side, va="top", fontsize=8,
            )  # fmt: skip
    step = 1 + len(chart.revisions) // _TICKS
    axes.set_xticks(range(0, len(chart.revisions), step), [one_line(one[:8]) for one in chart.revisions[::step]])
    axes.tick_params(axis="x", labelrotation=45)
    axes.margins(y=0.3 if any(line.change for line in chart.lines) else 0.1)
    axes.set_xlim(-0.6, len(chart.revisions) - 0.4)
    axes.set(xlabel="revision (a cross at the bottom: it failed)", ylabel="median and interval, ms")
    axes.figure.legend(loc="outside lower left")
    return True


def _of(setting: str) -> str:
    """Return the colour that the theme gives a setting."""
    from matplotlib import rcParams

    settings: Any = rcParams
    return settings[setting]


def _rows(axes: Any, names: Sequence[str], *, each: float = 0.4, more: float = 0.0) -> range:
    """Size a figure for a named row for each bar, the first of them on top. Return the rows' positions."""
    axes.figure.set_size_inches(_WIDTH_INCHES, 1.5 + each * len(names) + more)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_yticks(range(len(names)), [short(name, _LABEL) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    return range(len(names))


def _legend(axes: Any) -> None:
    """Put the legend below the plot, where it covers nothing."""
    axes.figure.legend(loc="outside lower left", ncols=2)


def _mixed(paint: str, other: str, share: float) -> Sequence[float]:
    """Return a mixture of two colours, with this share of the first."""
    from matplotlib.colors import to_rgb

    return [share * mine + (1 - share) * its for mine, its in zip(to_rgb(paint), to_rgb(other), strict=True)]


#: Function that draws each kind of chart. It returns False if there is nothing to draw.
_DRAWN: Final[Mapping[type[Any], Callable[[Any, Any], bool]]] = {
    BestSoFar: _best_so_far,
    Leaderboard: _leaderboard,
    Categories: _categories,
    FastP: _fast_p,
    Times: _times,
    SearchCurve: _search_curve,
    Importances: _importances,
    Roofline: _roofline,
    Claims: _claims,
    History: _history,
}
