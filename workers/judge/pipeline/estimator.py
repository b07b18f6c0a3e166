"""From samples of timed calls to a measurement with its interval, and the rule for when there are enough samples.

This module is pure. It knows no clock, process or device: callers make the calls, and add their samples and seconds.

1. :class:`Stopping` says which calls a turn makes, takes their samples, and says when they suffice.
2. :class:`Series` holds the samples of one process by one clock.
3. :func:`summarise` makes a measurement of a series, with the launch overhead of :func:`overhead_of` subtracted.
4. :func:`is_longer`, :func:`is_shorter` and :func:`has_drifted` compare two measurements of one reference.
"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, Literal, NamedTuple

from kqueue.contract import Purpose, Timing
from kqueue.evidence import Clocks, Histogram, Measurement

Basis = Literal["gpu_clock", "cpu_clock"]

#: Minimum number of calls in a measurement, even if the time budget is exceeded, and of overhead calls.
FEWEST: Final = 5
FEWEST_OVERHEADS: Final = 3
#: Minimum number of calls after an empty kernel, and the one at which their excess over plain calls is no accident.
FEWEST_IN_TURN: Final = 3
_CERTAIN_IN_TURN: Final = 8
#: By purpose: the relative half width of the median's interval at which calls suffice, the minimum number of calls
#: before the first look at it, and the number of random values that are added to this minimum.
_LOOKS: Final = {Purpose.TRAIN: (0.05, 5, 4), Purpose.RANK: (0.01, 9, 6), Purpose.PUBLISH: (0.005, 14, 7)}
#: Standard deviations in half a median's interval. It is wider if a series went on after its first look, because it
#: ends at the look at which the samples happen to differ least (`benchmarks/coverage.py`).
_DEVIATES: Final = (1.96, 2.05)
#: Factors that make half the range of few overhead calls as wide as this interval, by a process's own clock. By the
#: judge's clock kernel and reference subtract the same overhead, whose error counts twice already.
_FEW: Final = {3: 1.5, 4: 1.1}
#: Number of overhead calls as a share of the calls, of a candidate and of the reference, and until there are enough.
#: They are spread over the calls, because the first calls can be slower.
OVERHEAD_SHARES: Final = (0.2, 0.3)
_FIRST_SHARE: Final = 0.5
#: Number of calls over which the calls on variants are spread.
_SPREAD: Final = 12
#: Time in seconds after which a series ends even if it is not precise, if it has enough calls, and for which the
#: reference is called in turn. By the CPU's clock, more calls next to other processes hardly narrow the interval.
SERIES_S: Final[dict[Basis, float]] = {"gpu_clock": 1.0, "cpu_clock": 0.2}
#: Time by which a call after an empty kernel can exceed a plain one, in nanoseconds and as a share. The kernel takes
#: about 2 us, a call with its own order 30 us more, and a context switch on the GPU 280 us.
_IN_TURN_SLACK: Final = (60e3, 0.02)
#: Duration of calls in nanoseconds above which a context switch is too short to be seen.
_LONG_NS: Final = (280e3 - _IN_TURN_SLACK[0]) / _IN_TURN_SLACK[1]
#: Number of calls after which overhead calls that take longer than the calls are no accident, and the least number of
#: them for one of several shapes.
_CERTAIN: Final = 30
_CERTAIN_OF_SHAPE: Final = 10
#: Sufficient precision of the launch overhead relative to the precision of the calls.
_OVERHEAD_PART: Final = 0.25
#: Half width in nanoseconds at which any median is precise enough, because a GPU's clock is no finer.
_RESOLUTION_NS: Final = 500.0
#: Time in nanoseconds by which a candidate's overhead by the CPU's clock on a GPU can exceed the reference's.
_CPU_OVERHEAD_NS: Final = 50e3
#: Error in nanoseconds between two processes that wait for the GPU in their forwards, with six busy slots on an H100.
_WAITING_NS: Final = 35e3
#: Number of samples, of calls and of overhead calls each, above which not all of their differences are formed.
_THINNED: Final = 200
#: Factor by which the mean of a kernel's calls can exceed their median more than the reference's does.
_SKEW: Final = 1.1
#: Share of the longest calls that does not count in that mean. Time slices of other contexts lengthened up to a third
#: of the calls of an honest kernel that uses several streams.
_TRIMMED: Final = 0.35
#: The same for CPU time between the calls, and the share of the time of a call above which it is added to that time.
#: Of 46 honest kernels on busy cores it was 6 % at most.
_TRIMMED_BETWEEN: Final = 0.2
_BETWEEN: Final = 0.1
#: Number of bins of a histogram, and the number of interquartile ranges above the third quartile where its range ends.
_BINS: Final = 20
_FAR: Final = 3.0
#: Maximum factor by which the judge's own work inside a call can differ from its time when a baseline was cached.
_DRIFT: Final = 1.25
#: Share by which a time in turn with the kernel can be longer than a time without the kernel, or shorter than a cached
#: one, by clock, and the difference in milliseconds that is noise. The cached time's own error applies if it is more.
_LONGER: Final[dict[Basis, float]] = {"gpu_clock": 0.02, "cpu_clock": 0.1}
_SHORTER: Final = 0.05
_NOISE_MS: Final[dict[Basis, float]] = {"gpu_clock": 0.0005, "cpu_clock": 0.02}


class Kind(Enum):
    """The reason for a timed call."""

    SAMPLE = auto()
    OVERHEAD = auto()
    IN_TURN = auto()
    VARIANT = auto()


class Sample(NamedTuple):
    """The times of one call in nanoseconds.

    Attributes:
        ns: the whole span.
        yardstick_ns: the judge's own work before GO.
        own_ns: the time of the forward by the process's own clock, or -1 if it reported none. Not trusted.
        between_ns: by the CPU's clock, CPU time of the process from the end of its call before to this call's order.
    """

    ns: int
    yardstick_ns: int
    own_ns: int = -1
    between_ns: int = 0


@dataclass(frozen=True, slots=True)
class _Errors:
    """Errors of the judge's clock and of a process's own clock. See docs/timing.md for their measurement.

    Attributes:
        outside, own: error between two processes that run the same code, which is not visible within one series, in
            nanoseconds and as a share of the time.
        agrees: difference between both clocks that is the judge's error: nanoseconds, share of the time, and multiples
            of the error of the reference's median and of the reference's own difference.
        most_ns: maximum of all but the share. The share applies up to a fifth of ``limit_ns``.
        reference_ns: the same difference, for the reference.
        limit_ns: time above which a candidate's own clock does not count, because the judge's is precise enough.
        resolution_ns: half width at which the median by the own clock is precise enough.
        settled_ns: half width of the judge's median at which it can confirm or refute the process's own clock.
        overhead_ns: half width at which the launch overhead is precise enough, if the own clock times the calls.
        overheads_ns: difference between the overheads of two processes by their own clocks.
    """

    outside: tuple[float, float]
    own: tuple[float, float]
    agrees: tuple[float, float, float, float]
    most_ns: float
    reference_ns: float
    limit_ns: float
    resolution_ns: float
    settled_ns: float
    overhead_ns: float
    overheads_ns: float


_ERRORS: Final[dict[Basis, _Errors]] = {
    "gpu_clock": _Errors(
        outside=(2500.0, 0.005), own=(300.0, 0.005), agrees=(4e3, 0.02, 0.0, 1.0), most_ns=6e3, reference_ns=10e3,
        limit_ns=500e3, resolution_ns=150.0, settled_ns=2e3, overhead_ns=1e3, overheads_ns=600.0,
    ),
    "cpu_clock": _Errors(
        outside=(20e3, 0.02), own=(3e3, 0.02), agrees=(20e3, 0.05, 3.0, 0.0), most_ns=100e3, reference_ns=300e3,
        limit_ns=5e6, resolution_ns=3e3, settled_ns=math.inf, overhead_ns=math.inf, overheads_ns=30e3,
    ),
}  # fmt: skip


@dataclass(slots=True)
class Series:
    """Times in nanoseconds, including the launch overhead.

    Attributes:
        warming: number of further samples that do not count, because they warm up.
        looks_in_turn: whether calls after an empty kernel are made too.
        calls: the timed calls.
        overheads: overhead calls.
        yardsticks: the judge's own work inside the calls.
        own, own_overheads: times of the same calls by the process's own clock, which are not trusted, or -1.
        unlooked: number of the last calls for which it is not known whether the device was throttled.
        discarded: number of calls that do not count because the device was throttled.
        kept: times of the calls that are kept to be verified.
        in_turn: additional calls after an empty kernel.
        variants: calls on hidden variants.
        between: by the CPU's clock, CPU time of the process before each call, while it had no order.
        layouts: strides of the outputs of all calls.
        spared_ns: time that copying outputs of these strides saves over copying the reference's.
        empty_ns: time of one empty kernel if only the overhead calls contain it. It must not be subtracted.
    """

    basis: Basis
    warming: int = 0
    looks_in_turn: bool = False
    calls: list[int] = field(default_factory=list[int])
    overheads: list[int] = field(default_factory=list[int])
    yardsticks: list[int] = field(default_factory=list[int])
    own: list[int] = field(default_factory=list[int])
    own_overheads: list[int] = field(default_factory=list[int])
    unlooked: int = 0
    discarded: int = 0
    kept: list[int] = field(default_factory=list[int])
    in_turn: list[int] = field(default_factory=list[int])
    variants: list[int] = field(default_factory=list[int])
    between: list[int] = field(default_factory=list[int])
    layouts: set[tuple[tuple[int, ...], ...]] = field(default_factory=set[tuple[tuple[int, ...], ...]])
    spared_ns: float = 0.0
    empty_ns: float = 0.0
    clocks: dict[str, float | str | None] = field(default_factory=dict[str, float | str | None])

    @property
    def yardstick_ms(self) -> float | None:
        """Median time of the judge's own work inside the calls, or None by the CPU's clock."""
        return statistics.median(self.yardsticks) / 1e6 if self.basis == "gpu_clock" else None

    @property
    def has_own(self) -> bool:
        """True if the process reported a time by its own clock for each call and overhead call."""
        return len(self.own) == len(self.calls) and min(self.own + self.own_overheads, default=-1) >= 0

    @property
    def takes_no_turn(self) -> bool:
        """True if calls did not wait for a GPU time slice, but those after an empty kernel, or overhead calls, did."""
        call, errors = statistics.median(self.calls or [math.inf]), _ERRORS[self.basis]
        # Time slices of other contexts lengthen most of a few calls, and a context switch lengthens all.
        is_short = min(self.in_turn, default=0) > call + _IN_TURN_SLACK[0] + _IN_TURN_SLACK[1] * call
        has_both = bool(self.calls and self.in_turn)
        return is_short or (has_both and sum(_net_ns(self, self.overheads)) < -errors.outside[0])

    @property
    def lacks_in_turn(self) -> bool:
        """True if more calls after an empty kernel are needed."""
        fewest = _CERTAIN_IN_TURN if self.takes_no_turn else FEWEST_IN_TURN
        is_short = statistics.median(self.calls or [_LONG_NS]) < _LONG_NS
        return self.looks_in_turn and is_short and len(self.in_turn) < fewest

    @property
    def trimmed(self) -> tuple[float, float]:
        """Mean of the calls without the longest few, which other processes cause, and its standard error."""
        ordered = sorted(self.calls)
        counted = ordered[: len(ordered) - int(_TRIMMED * len(ordered))]
        spread = statistics.stdev([min(each, counted[-1]) for each in ordered])
        return statistics.fmean(counted), spread * math.sqrt(len(ordered)) / len(counted)

    def is_uneven(self, reference: Series) -> bool:
        """Return whether the mean exceeds the median by far more than the mean of a reference in turn exceeds its own.

        Next to other processes one of both medians can be a time slice longer. So the reference's is this one less the
        median of all differences.
        """
        (mean, _), (theirs, error), middle = self.trimmed, reference.trimmed, statistics.median(self.calls)
        more = min(3 * error, (_SKEW - 1) * theirs)  # The kernel can disturb the reference's calls.
        return mean / middle > (_SKEW * theirs + more) / (middle - _net_ns(self, reference.calls)[0])

    @property
    def between_ns(self) -> float:
        """Mean CPU time between two calls, without the longest few, in which an honest process ends its reply."""
        ordered = sorted(self.between)
        return statistics.fmean(ordered[: len(ordered) - int(_TRIMMED_BETWEEN * len(ordered))] or [0])

    def variant_ratio(self, overhead_ns: float) -> float | None:
        """Return the median time on variants relative to that on the problem's inputs. None if it is too short."""
        gross, usual = statistics.median(self.variants), statistics.median(self.calls)
        net = usual - overhead_ns + self.empty_ns
        return (net + gross - usual) / net if net > 0 else None

    def add(self, kind: Kind, sample: Sample) -> bool:
        """Add the sample of a call. Return True if it is one of the calls that count."""
        if not self.warming:
            self.between.append(sample.between_ns)
        if kind is Kind.IN_TURN:
            self.in_turn.append(sample.ns)
        elif kind is Kind.VARIANT:
            self.variants.append(sample.ns)
        elif self.warming:
            self.warming -= kind is Kind.SAMPLE
        else:
            ns, own = (self.calls, self.own) if kind is Kind.SAMPLE else (self.overheads, self.own_overheads)
            ns.append(sample.ns)
            own.append(sample.own_ns)
            self.yardsticks.append(sample.yardstick_ns)
            self.unlooked += kind is Kind.SAMPLE
            return kind is Kind.SAMPLE
        return False

    def look(self, *, throttled: bool) -> None:
        """Discard the calls since the last look at the device's clocks if it was throttled."""
        if throttled and self.unlooked:
            del self.calls[-self.unlooked :], self.own[-self.unlooked :]
            self.discarded += self.unlooked
        self.unlooked = 0

    def knows_overhead(self, wanted: float) -> bool:
        """Return whether the launch overhead is so precise that more measurements would not improve net times."""
        if self.basis != "gpu_clock" or len(self.overheads) < FEWEST_OVERHEADS or len(self.calls) < FEWEST:
            return False
        net = statistics.median(self.calls) - statistics.median(self.overheads)
        enough = _ERRORS[self.basis].overhead_ns if self.has_own else 0.0
        return half_width(self.overheads) <= max(_OVERHEAD_PART * wanted * net, enough)

    def is_precise(self, wanted: float) -> bool:
        """Return whether the median is as precise as wanted, or as the clock allows."""
        (net, width), errors = _net_ns(self, self.overheads), _ERRORS[self.basis]
        if net < errors.limit_ns and self.has_own:
            return half_width(self.own) <= max(wanted * net, errors.resolution_ns)
        return width <= max(wanted * net, _RESOLUTION_NS)


class Share(Timing):
    """The settings for one of several shapes, which share the time for the calls of one."""

    parts: int
    """Number of the shapes."""


def share(timing: Timing, parts: int) -> Timing:
    """Return the settings for one of several shapes. Their mean is about as precise as the time of one shape alone."""
    # Errors of independent shapes add up in squares.
    changed = {"max_error": timing.max_error * math.sqrt(parts), "parts": parts}
    return Share.model_validate(dict(timing) | changed) if parts > 1 else timing


def _looks(timing: Timing) -> tuple[float, int, int, float]:
    """Return the values of :data:`_LOOKS`, and the share of the time, for one of several shapes."""
    (precision, fewest, more), parts = _LOOKS[timing.purpose], timing.parts if isinstance(timing, Share) else 1
    counts = max(FEWEST, math.ceil(fewest / parts)), max(2, math.ceil(more / parts))
    return precision * math.sqrt(parts), *counts, 1 / parts


def most_before_look(timing: Timing) -> int:
    """Return the maximum number of calls before the first look at their precision."""
    _, fewest, more, _ = _looks(timing)
    return min(timing.calls, fewest + more - 1)


class Stopping:
    """Decides which calls a turn makes, and when the samples of a process and of the reference in turn with it suffice.

    Attributes:
        series: the series, the process's first.
        first_look: number of calls after which precision can end them.
    """

    def __init__(self, timing: Timing, series: list[Series], chance: random.Random, *, alone: bool = False) -> None:
        """Take the process's series, and the reference's if it is timed in turn.

        ``alone``: no other process uses the device, so that more calls by the CPU's clock narrow the interval.
        """
        self._timing = timing
        self._random = chance
        self.series = series
        self._precision, fewest, more, self._share = _looks(timing)
        self.first_look = fewest + int(chance.random() * more)
        self._beside_s = 0.0
        self._alone = alone
        self._needs_overheads = False

    def kinds(self, series: Series, share: float, variants: int = 0) -> list[Kind]:
        """Return the calls of a process in a turn: one call that counts, and at random some of the other kinds.

        ``share`` is the number of overhead calls as a share of the calls, ``variants`` the number of variants left.
        """
        calls, missing = len(series.calls), FEWEST_OVERHEADS - len(series.overheads)
        if self._is_spent(series) and calls >= FEWEST and missing <= 0:
            return []
        if missing > 0:
            share = max(_FIRST_SHARE, missing / max(1, self._timing.calls - calls))
        wants = self._random.random() < share and not series.knows_overhead(self._precision)
        overhead = [Kind.OVERHEAD] if wants or self._needs_overheads else []
        variant = not series.warming and self._random.random() < variants / max(1, _SPREAD - calls)
        # No call comes before one that counts on the same inputs. A kernel could work in the first of them.
        return [*[Kind.VARIANT] * variant, Kind.SAMPLE, *overhead]

    def add(self, series: Series, kind: Kind, sample: Sample | None, seconds: float) -> bool:
        """Add a call that took ``seconds``, with its times if it could be timed. Return True if it counts."""
        if series is not self.series[0]:
            self._beside_s += seconds
        return sample is not None and series.add(kind, sample)

    def is_finished(self, seconds: float, *, late: bool) -> bool:
        """Return whether no call is needed, ``seconds`` after the first one. If ``late``, the fewest calls suffice."""
        own, *beside = self.series
        done = all(self._suffices(series, seconds, late=late) for series in self.series)
        if done and not late and len(own.calls) < self._timing.calls:
            certain = max(_CERTAIN_OF_SHAPE, int(_CERTAIN * self._share))
            done = is_settled(own, *beside, certain=certain) and all(is_settled(one, certain=certain) for one in beside)
            self._needs_overheads = not done
        return done

    def _suffices(self, series: Series, seconds: float, *, late: bool) -> bool:
        calls = len(series.calls)
        if len(series.overheads) < FEWEST_OVERHEADS or calls < FEWEST:
            return False
        if calls >= self._timing.calls or late or self._is_spent(series):
            return True
        return calls >= self.first_look and (seconds > self._limit_s(series) or series.is_precise(self._precision))

    def _is_spent(self, series: Series) -> bool:
        """Return whether this is the reference in turn with a kernel, and has used its time."""
        return series is not self.series[0] and self._beside_s > self._limit_s(series)

    def _limit_s(self, series: Series) -> float:
        return SERIES_S["gpu_clock" if self._alone else series.basis] * self._share


def is_settled(series: Series, reference: Series | None = None, *, certain: int = _CERTAIN) -> bool:
    """Return whether the clock of a series' time is settled. If not, more calls and overhead calls are needed.

    A few overhead calls can all be too short or too long. Then they are longer than the calls, on a GPU by more than
    the clock's error, or the judge's clock does not confirm the process's own. Only a precise median that differs by
    more than its interval refutes it: time slices of other contexts can lengthen most of a few calls.

    Args:
        reference: for a candidate, the series of the reference in turn with it.
        certain: number of calls after which longer overhead calls are no accident.
    """
    both = [series] if reference is None else [series, reference]
    net, width = max(_net_ns(series, one.overheads) for one in both)
    net, errors = net + series.empty_ns, _ERRORS[series.basis]
    if net < (-errors.outside[0] if series.basis == "gpu_clock" else 0.0):
        return len(series.calls) >= certain
    if series.basis != "gpu_clock" or net > errors.limit_ns or not series.has_own:
        return True
    if (excess := _excess_ns(series, net, reference)) is None:
        return True
    is_precise, is_certain = width <= errors.settled_ns, width <= abs(excess)
    return (is_precise and is_certain) if excess > 0 else (is_precise or is_certain)


def _net_ns(series: Series, overheads: list[int], deviate: float = _DEVIATES[0]) -> tuple[float, float]:
    """Return by how much a series' calls exceed overhead calls, and half the width of its interval.

    On a GPU it is the median of all differences (Hodges and Lehmann, 1963). Time slices of other contexts lengthen
    about half of both kinds of calls, so the difference of their medians can be a whole slice too long or too short.
    """
    width = half_width(series.calls, deviate)
    if series.basis == "cpu_clock":
        return statistics.median(series.calls) - statistics.median(overheads), width
    # Of long lists, evenly spread order statistics suffice.
    calls, overheads = (sorted(ns)[:: 1 + len(ns) // _THINNED] for ns in (series.calls, overheads))
    ordered = sorted(call - overhead for call in calls for overhead in overheads)
    count = len(ordered)
    low = max(0, math.floor(count / 2 - deviate * math.sqrt(count * (len(calls) + len(overheads) + 1) / 12)))
    # This interval is too wide for a forward that varies more than the overhead.
    medians = math.hypot(width, half_width(overheads))
    return statistics.median(ordered), min(medians, (ordered[count - 1 - low] - ordered[low]) / 2)


def overhead_of(
    series: Series, baseline: Measurement | None = None, reference: Series | None = None, *, on_gpu: bool
) -> float:
    """Return the launch overhead of a series in nanoseconds: what its median call contains, or on a CPU the minimum.

    Other processes on a CPU make calls slower. If that were included in the overhead, net times would be too short or
    even negative.

    Args:
        series: the series of a candidate, which can have slowed its overhead calls, or of the reference.
        baseline: for a candidate, the reference's measurement. Its overhead counts if it is smaller, after subtracting
            the time that the judge's own work in the calls saves since then, and saves with these outputs' strides.
        reference: for a candidate, the reference's series in turn with it, or None.
    """
    middle = statistics.median(series.calls)
    own = middle - _net_ns(series, series.overheads)[0] if on_gpu else float(min(series.overheads))
    if baseline is None:
        return own
    then, now = baseline.yardstick_ms, series.yardstick_ms
    quicker = 0.0 if then is None or now is None else max(0.0, then - now)
    theirs = baseline.overhead_ms * 1e6
    if reference is not None and series.basis == "gpu_clock":
        theirs = middle - _net_ns(series, reference.overheads)[0]
    theirs -= quicker * 1e6 + series.spared_ns
    slack = _CPU_OVERHEAD_NS if on_gpu and series.basis == "cpu_clock" else 0.0
    return max(0.0, own if own <= theirs + slack else theirs)


def summarise(
    series: Series,
    overhead_ns: float,
    timing: Timing,
    reference: Series | None = None,
    *,
    on_gpu: bool,
    fine: bool = True,
) -> Measurement:
    """Return a series as a measurement in milliseconds, without the launch overhead.

    No call counts as shorter than the shortest kept call if even that took longer than the median. Otherwise a kernel
    could do its work in some calls only, and gain if by luck no other call was kept. For the same reason no call counts
    as shorter than the mean if the mean exceeds the median by far more than the reference's. On a CPU, work between the
    calls is added to each.

    Args:
        reference: for a candidate, the reference's series in turn with it, or None.
        fine: False to use the judge's clock in any case. A kernel and its baseline are compared by the same clock.
    """
    middle = statistics.median(series.calls)
    least = min(series.kept, default=0)
    if least <= middle:
        least = 0
    if reference is not None and series.is_uneven(reference):
        least = max(least, statistics.fmean(series.calls))
    taken = overhead_ns - series.empty_ns
    times = [max(call, least) - taken for call in series.calls]
    own = _own_times(series, middle - taken, reference) if fine and not least else None
    samples = (series.calls, series.overheads)
    if own is not None:
        times, samples = own, (series.own, series.own_overheads)
    between = 0.0 if on_gpu or reference is None else series.between_ns
    if is_late := between > _BETWEEN * statistics.median(times):
        times = [each + between for each in times]
    # The overhead's noise can exceed a short call, and no time is below zero.
    times = [max(0.0, each / 1e6) for each in times]
    q1, median, q3 = statistics.quantiles(times, n=4, method="inclusive")
    deviate = _DEVIATES[len(times) > most_before_look(timing)]
    few = _FEW.get(len(samples[1]), 1.0) if own is not None else 1.0
    widths = half_width(samples[0], deviate), few * half_width(samples[1])
    if own is None and series.basis == "gpu_clock":
        widths = max(_net_ns(series, one.overheads, deviate)[1] for one in (series, reference or series)), 0.0
    error_ms = math.hypot(*widths, _clock_error_ns(series.basis, median, on_gpu=on_gpu, fine=own is not None)) / 1e6
    # Without a slice that lengthened the median call: later series of other kernels can use this overhead.
    overhead_ns = min(overhead_ns, statistics.median(series.overheads))
    return Measurement(
        basis=series.basis, purpose=timing.purpose, count=len(times), discarded=series.discarded,
        precision=half_width(samples[0]) / 1e6 / median if median > 0 else None, low_ms=max(0.0, median - error_ms),
        high_ms=median + error_ms, is_fine=own is not None, yardstick_ms=series.yardstick_ms, median_ms=median,
        q1_ms=q1, q3_ms=q3, mean_ms=statistics.fmean(times), std_ms=statistics.stdev(times), min_ms=min(times),
        max_ms=max(times), overhead_ms=overhead_ns / 1e6, cold_l2=timing.cold_l2 and on_gpu,
        clocks=Clocks.model_validate(series.clocks), histogram=_histogram(times, q3 + _FAR * (q3 - q1)),
        samples_ms=tuple(round(each, 6) for each in times), between_ms=between / 1e6 if is_late else None,
    )  # fmt: skip


def _clock_error_ns(basis: Basis, median_ms: float, *, on_gpu: bool, fine: bool) -> float:
    fixed, share = _ERRORS[basis].own if fine else _ERRORS[basis].outside
    if on_gpu and basis == "cpu_clock":
        fixed = max(fixed, _WAITING_NS)
    return math.hypot(fixed, share * median_ms * 1e6)


def common_error(taken: Measurement, *, on_gpu: bool) -> float:
    """Return the part of a time's relative error that is the same for all shapes of a process: the clock's."""
    if not taken.median_ms:
        return 0.0
    error_ns = _clock_error_ns(taken.basis, taken.median_ms, on_gpu=on_gpu, fine=taken.is_fine)
    return error_ns / 1e6 / taken.median_ms


def _own_times(series: Series, outside_ns: float, reference: Series | None) -> list[float] | None:
    """Return the times of the calls by the process's own clock, or None if the judge's clock does not confirm them.

    Args:
        outside_ns: median time by the judge's clock.
        reference: for a candidate, the reference's series. A candidate could slow its overhead calls.
    """
    if not series.has_own:
        return None
    if series.basis == "cpu_clock":
        # The least overhead, which counts on a CPU, is far below the usual one where other processes use the cores.
        outside_ns = statistics.median(series.calls) - statistics.median((reference or series).overheads)
    excess = _excess_ns(series, outside_ns, reference)
    return None if excess is None or excess > 0 else _claimed(series, reference)


def _claimed(series: Series, reference: Series | None) -> list[float]:
    """Return the times of the calls by the process's own clock without the launch overhead."""
    overhead = statistics.median(series.own_overheads)
    if reference is not None:
        overhead = min(overhead, statistics.median(reference.own_overheads) + _ERRORS[series.basis].overheads_ns)
    return [each - overhead + series.empty_ns for each in series.own]


def _excess_ns(series: Series, outside_ns: float, reference: Series | None) -> float | None:
    """Return by how much the two clocks differ beyond the judge's error, negative if they agree.

    Return None if the process's own clock cannot count.
    """
    errors = _ERRORS[series.basis]
    if reference is not None and (outside_ns > errors.limit_ns or not reference.own_overheads):
        return None
    if (median := statistics.median(_claimed(series, reference))) <= 0:
        return None  # Noise in the overhead exceeds the forward's time.
    least, share, times_error, times_difference = errors.agrees
    if reference is None:
        return abs(median - outside_ns) - errors.reference_ns - share * abs(median)
    outside_reference = _net_ns(reference, reference.overheads)[0] + reference.empty_ns
    difference = outside_reference - statistics.median(_claimed(reference, None))
    least += times_error * half_width(reference.calls) + times_difference * max(0.0, difference)
    # A candidate would only claim to be shorter than it is.
    return outside_ns - median - min(least, errors.most_ns) - share * min(median, errors.limit_ns / 5)


def _histogram(times: list[float], far: float) -> Histogram:
    """Count times in bins of equal width from the shortest to the longest, or to ``far`` if some are longer."""
    low, high = min(times), min(max(times), far)
    counts = [0] * (_BINS if high > low else 1)
    for one in times:
        index = int(len(counts) * (one - low) / (high - low)) if high > low else 0
        counts[min(index, len(counts) - 1)] += 1
    return Histogram(low_ms=low, high_ms=high, counts=tuple(counts))


def half_width(calls: list[int], deviate: float = _DEVIATES[0]) -> float:
    """Return half the width of the median's confidence interval, from order statistics."""
    ordered, count = sorted(calls), len(calls)
    low = max(0, math.floor((count - deviate * math.sqrt(count)) / 2))
    return (ordered[count - 1 - low] - ordered[low]) / 2


def is_longer(beside: Measurement, alone: Measurement) -> bool:
    """Return whether a time in turn with a kernel is so long that the kernel can have slowed down the reference."""
    most = alone.median_ms * (1 + _LONGER[beside.basis]) + _NOISE_MS[beside.basis]
    return beside.median_ms > max(most, alone.median_ms * (1 + (alone.error or 0.0)))


def is_shorter(beside: Measurement, alone: Measurement) -> bool:
    """Return whether a time in turn with a kernel shows that the machine has become faster since ``alone``."""
    least = alone.median_ms * (1 - _SHORTER) - _NOISE_MS[beside.basis]
    return beside.q1_ms > 0 and beside.median_ms < min(least, alone.median_ms * (1 - (alone.error or 0.0)))


def has_drifted(known: Measurement, now: float | None) -> bool:
    """Return whether the judge's own work in the calls shows that the device has changed since the baseline."""
    then = known.yardstick_ms
    return then is not None and now is not None and not 1 / _DRIFT < then / now < _DRIFT
