"""Drawing of each kind of chart on a figure of matplotlib."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

from kqueue.categories import CATEGORIES, Blame
from kqueue.charts.data import (
    BestSoFar,
    Categories,
    Chart,
    FastP,
    Importances,
    Leaderboard,
    Point,
    Roofline,
    SearchCurve,
    Times,
)
from kqueue.charts.themes import (
    CURVE_LINES,
    CURVE_MARKS,
    HATCHES,
    MARKS,
    Theme,
    background,
    colour,
    colour_of,
    ink,
    quiet,
)
from kqueue.text import one_line

#: Maximum number of characters of a label.
_LABEL: Final = 36
#: Maximum number of characters of a title.
_TITLE: Final = 80
#: Number of points from which they are drawn as one image within an SVG, to save megabytes.
_POINTS: Final = 2000
#: Maximum number of kernels on a roofline, so that they stay distinguishable.
_SPOTS: Final = 7
_WIDTH_INCHES: Final = 8.0
_BLAMES: Final = {
    Blame.NONE: "passed",
    Blame.CANDIDATE: "the kernel failed",
    Blame.PROBLEM: "the problem failed",
    Blame.FLEET: "the fleet failed",
    Blame.NOBODY: "cancelled or expired",
}


def draw(figure: Any, chart: Chart, theme: Theme) -> None:
    """Draw a chart on a figure, under the theme's settings."""
    axes = figure.subplots()
    axes.set_title(_short(chart.title, _TITLE))
    if not _DRAWN[type(chart)](chart, figure, axes, theme):
        axes.set_axis_off()
        axes.text(
            0.5, 0.5, "nothing to show yet", transform=axes.transAxes, ha="center", va="center", color=quiet(theme)
        )


def _best_so_far(chart: BestSoFar, _figure: Any, axes: Any, theme: Theme) -> bool:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter, date2num

    points = sorted(chart.points, key=lambda point: (point.at, point.evaluation_id))
    if not points:
        return False
    flat = len(points) > _POINTS
    began, first = points[0].at, float(date2num(points[0].at))

    def days(some: Iterable[Point]) -> array[float]:
        # An array, because matplotlib would check each item of a list of tens of thousands, more than once.
        return array("d", (first + (point.at - began).total_seconds() / 86400 for point in some))

    timed = [point for point in points if point.passed and point.speedup is not None]
    if timed:
        speedups = array("d", (point.speedup or 0.0 for point in timed))
        best = array("d", accumulate(speedups, max))
        axes.scatter(
            days(timed), speedups, s=26, marker=MARKS[Blame.NONE], linewidths=0.6,
            color=colour_of(theme, Blame.NONE), edgecolors=background(theme), alpha=0.75, label="passed",
            rasterized=flat,
        )  # fmt: skip
        # The best is drawn up to the last candidate of all.
        axes.step(
            days([*timed, points[-1]]), array("d", [*best, best[-1]]), where="post", color=colour(theme, 0),
            linewidth=2.2, label=f"best so far: {best[-1]:.2f}x",
        )  # fmt: skip
        axes.axhline(1.0, color=quiet(theme), linewidth=1, linestyle="--")
        top = max(best[-1], 1.0)
    else:
        top = 1.0
    # Candidates without a speedup are drawn at zero.
    axes.set_ylim(-0.06 * top, 1.12 * top)
    for blame, mark in MARKS.items():
        at_zero = [point for point in points if point.blame is blame and (point.speedup is None or not point.passed)]
        if at_zero:
            name = "passed, not timed" if blame is Blame.NONE else _BLAMES[blame]
            axes.scatter(
                days(at_zero), array("d", [0.0]) * len(at_zero), s=26, marker=mark, color=colour_of(theme, blame),
                alpha=0.75, linewidths=1.4, label=f"{name} ({len(at_zero)})", rasterized=flat,
            )  # fmt: skip
    locator = AutoDateLocator()
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    axes.set_ylabel("speedup")
    axes.set_xlabel("time of the verdict, UTC")
    _legend(axes)
    return True


def _leaderboard(chart: Leaderboard, figure: Any, axes: Any, theme: Theme) -> bool:
    if not chart.bars:
        return False
    _rows(figure, axes, len(chart.bars))
    speedups = [bar.speedup for bar in chart.bars]
    positions = list(range(len(chart.bars)))
    axes.barh(positions, speedups, height=0.62, color=colour(theme, 0))
    for position, bar in enumerate(chart.bars):
        low, high = (bar.speedup if one is None else one for one in (bar.low, bar.high))
        if high > low:
            # The spread is drawn separately from the bar's end, because the median is not always in its middle.
            axes.plot([low, high], [position, position], color=ink(theme), linewidth=1.6, marker="|", markersize=9)
        note = f"  {_short(bar.note, _LABEL)}" if bar.note else ""
        axes.annotate(
            f"{bar.speedup:.2f}x{note}", (max(bar.speedup, high), position), xytext=(8, 0), textcoords="offset points",
            va="center", color=ink(theme),
        )  # fmt: skip
    axes.axvline(1.0, color=quiet(theme), linewidth=1, linestyle="--")
    axes.set_yticks(positions, _labels(bar.label for bar in chart.bars))
    widest = max(max(bar.speedup, bar.high or 0.0) for bar in chart.bars)
    axes.set_xlim(0, max(1.05, widest) * (1.45 if any(bar.note for bar in chart.bars) else 1.18))
    axes.set_xlabel("speedup over the baseline, and its quartiles")
    return True


def _categories(chart: Categories, figure: Any, axes: Any, theme: Theme) -> bool:
    stacks = [stack for stack in chart.stacks if sum(stack.counts.values())]
    if not stacks:
        return False
    blames = list(Blame)
    order = sorted(
        {category for stack in stacks for category, number in stack.counts.items() if number},
        key=lambda category: (blames.index(category.blame), list(CATEGORIES).index(category)),
    )
    positions = list(range(len(stacks)))
    left = [0.0] * len(stacks)
    within: dict[Blame, int] = {}
    of_blame = {blame: sum(category.blame is blame for category in order) for blame in blames}
    for category in order:
        blame = category.blame
        nth = within[blame] = within.get(blame, -1) + 1
        widths = [stack.counts.get(category, 0) for stack in stacks]
        # Categories of one blame are shades of its colour. Blames also differ in their hatches.
        shade = 1.0 - 0.6 * nth / max(1, of_blame[blame])
        axes.barh(
            positions, widths, left=left, height=0.6, color=_mixed(colour_of(theme, blame), background(theme), shade),
            edgecolor=background(theme), linewidth=1, hatch=HATCHES[blame],
            label=f"{category} ({sum(widths)}), {_BLAMES[blame]}" if blame is not Blame.NONE
            else f"{category} ({sum(widths)})",
        )  # fmt: skip
        left = [start + width for start, width in zip(left, widths, strict=True)]
    _rows(figure, axes, len(stacks), more=0.28 * ((len(order) + 1) // 2) + 0.3)
    axes.set_yticks(positions, _labels(f"{stack.label} ({sum(stack.counts.values())})" for stack in stacks))
    axes.set_xlim(0, max(left))
    axes.set_xlabel("evaluations")
    axes.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(loc="outside lower left", ncols=2, handlelength=2.2, handleheight=1.1)
    return True


def _fast_p(chart: FastP, _figure: Any, axes: Any, theme: Theme) -> bool:
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
    axes.step(steps, shares, where="post", color=colour(theme, 0), linewidth=2.2)
    axes.fill_between(steps, shares, step="post", color=colour(theme, 0), alpha=0.15)
    axes.plot([0], [right / chart.problems], marker="o", color=colour(theme, 2), markersize=8, clip_on=False, zorder=3)
    _annotate(axes, theme, 0.0, right / chart.problems, f"correct: {right} of {chart.problems}")
    for p in (1.0, 2.0):
        axes.plot([p], [above(p)], marker="D", color=colour(theme, 1), markersize=6, zorder=3)
        _annotate(axes, theme, p, above(p), f"fast_{p:g}: {above(p):.0%}")
    axes.set_xlim(0, end)
    axes.set_ylim(0, 1.08)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0])
    axes.set_xlabel("p, the speedup to beat")
    axes.set_ylabel("share of problems")
    return True


def _annotate(axes: Any, theme: Theme, x: float, y: float, label: str) -> None:
    axes.annotate(label, (x, y), xytext=(9, 7), textcoords="offset points", color=ink(theme))


def _times(chart: Times, figure: Any, axes: Any, theme: Theme) -> bool:
    if not chart.spreads:
        return False
    _rows(figure, axes, len(chart.spreads), each=0.7)
    stats = [
        {"whislo": one.min_ms, "q1": one.q1_ms, "med": one.median_ms, "q3": one.q3_ms, "whishi": one.max_ms}
        for one in chart.spreads
    ]
    positions = list(range(len(stats)))
    drawn = axes.bxp(
        stats, positions=positions, orientation="horizontal", widths=0.5, showfliers=False, patch_artist=True,
        medianprops={"color": ink(theme), "linewidth": 2}, whiskerprops={"color": quiet(theme), "linewidth": 1.4},
        capprops={"color": quiet(theme), "linewidth": 1.4}, boxprops={"edgecolor": background(theme)},
    )  # fmt: skip
    for position, (box, one) in enumerate(zip(drawn["boxes"], chart.spreads, strict=True)):
        box.set(facecolor=colour(theme, position), hatch=("", "///", "...", "xxx")[position % 4])
        axes.annotate(
            f"{one.median_ms:.4g} ms, {one.count} calls", (one.median_ms, position), xytext=(0, 17),
            textcoords="offset points", ha="center", va="bottom", color=ink(theme), fontsize=9,
        )  # fmt: skip
    axes.set_yticks(positions, _labels(one.label for one in chart.spreads))
    axes.set_ylim(len(stats) - 0.4, -0.75)
    axes.set_xlim(0, 1.06 * max(one.max_ms for one in chart.spreads) or 1.0)
    axes.set_xlabel("milliseconds a call: shortest, quartiles, median, longest")
    return True


def _search_curve(chart: SearchCurve, _figure: Any, axes: Any, theme: Theme) -> bool:
    curves = [curve for curve in chart.curves if curve.points or curve.tests]
    if not curves:
        return False
    for index, curve in enumerate(curves):
        paint, mark = colour(theme, index), CURVE_MARKS[index % len(CURVE_MARKS)]
        numbers = [number for number, _ in curve.points]
        scores = [score for _, score in curve.points]
        axes.scatter(
            numbers, scores, s=22, marker=mark, color=paint, alpha=0.6, linewidths=0, rasterized=len(scores) > _POINTS
        )
        axes.step(
            numbers, list(accumulate(scores, max)), where="post", color=paint, linewidth=2.2,
            linestyle=CURVE_LINES[index % len(CURVE_LINES)], label=f"{_short(curve.label, _LABEL)}: best so far",
        )  # fmt: skip
        if curve.tests:
            axes.plot(
                [number for number, _ in curve.tests], [score for _, score in curve.tests], "x", color=paint,
                markersize=8, markeredgewidth=2, label=f"{_short(curve.label, _LABEL)}: best, judged again",
            )  # fmt: skip
    axes.set_xlabel("proposal")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel(_short(chart.metric, _LABEL))
    _legend(axes)
    return True


def _importances(chart: Importances, figure: Any, axes: Any, theme: Theme) -> bool:
    if not chart.shares:
        return False
    _rows(figure, axes, len(chart.shares))
    positions = list(range(len(chart.shares)))
    bars = axes.barh(positions, list(chart.shares.values()), height=0.62, color=colour(theme, 0))
    axes.bar_label(bars, fmt="%.2f", padding=5, color=ink(theme))
    axes.set_yticks(positions, _labels(chart.shares))
    axes.set_xlim(0, 1.1)
    axes.set_xlabel("importance (PED-ANOVA)")
    return True


def _roofline(chart: Roofline, _figure: Any, axes: Any, theme: Theme) -> bool:
    spots = [spot for spot in chart.spots if spot.flops_per_byte > 0 and spot.gflops > 0][:_SPOTS]
    if not spots or min(chart.peak_gbs, chart.peak_gflops) <= 0:
        return False
    ridge = chart.peak_gflops / chart.peak_gbs
    low = min([ridge, *(spot.flops_per_byte for spot in spots)]) / 4
    high = max([ridge, *(spot.flops_per_byte for spot in spots)]) * 4
    axes.plot(
        [low, ridge, high], [low * chart.peak_gbs, chart.peak_gflops, chart.peak_gflops], color=quiet(theme),
        linewidth=2.2, label=f"peak: {chart.peak_gbs:.4g} GB/s, {chart.peak_gflops:.4g} GFLOP/s in fp32",
    )  # fmt: skip
    for index, spot in enumerate(spots):
        share = spot.gflops / min(chart.peak_gflops, spot.flops_per_byte * chart.peak_gbs)
        axes.plot(
            [spot.flops_per_byte], [spot.gflops], linestyle="", markersize=9, color=colour(theme, index),
            marker=CURVE_MARKS[index % len(CURVE_MARKS)],
            label=f"{_short(spot.label, _LABEL)}: {share:.0%} of the roof",
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations for each byte of memory traffic")
    axes.set_ylabel("GFLOP/s")
    _legend(axes)
    return True


def _rows(figure: Any, axes: Any, number: int, *, each: float = 0.4, more: float = 0.0) -> None:
    """Size a figure for this number of rows of bars, the first of them on top."""
    figure.set_size_inches(_WIDTH_INCHES, 1.5 + each * number + more)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(number - 0.5, -0.5)


def _legend(axes: Any) -> None:
    """Put the legend below the plot, where it covers nothing."""
    axes.figure.legend(loc="outside lower left", ncols=2)


def _labels(names: Iterable[str]) -> list[str]:
    return [_short(name, _LABEL) for name in names]


def _short(name: str, most: int) -> str:
    """Return untrusted text on one line, without control characters, cut to a maximum length."""
    shown = one_line(name)
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def _mixed(paint: str, other: str, share: float) -> Sequence[float]:
    """Return a mixture of two colours, with this share of the first."""
    from matplotlib.colors import to_rgb

    pairs = zip(to_rgb(paint), to_rgb(other), strict=True)
    return [share * mine + (1 - share) * its for mine, its in pairs]


#: Function that draws each kind of chart. It returns False if there is nothing to draw.
_DRAWN: Final[Mapping[type[Any], Callable[[Any, Any, Any, Theme], bool]]] = {
    BestSoFar: _best_so_far,
    Leaderboard: _leaderboard,
    Categories: _categories,
    FastP: _fast_p,
    Times: _times,
    SearchCurve: _search_curve,
    Importances: _importances,
    Roofline: _roofline,
}
