"""Series of timed calls, and the statistics by which a series becomes a measurement."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Final, Literal

from kqueue.contract import Timing
from kqueue.evidence import Clocks, Histogram, Measurement
from workers.judge.slot_config import SlotConfig

Basis = Literal["gpu_clock", "cpu_clock"]

#: Minimum number of calls in a measurement, even if the time budget is exceeded, and of overhead calls.
FEWEST: Final = 5
FEWEST_OVERHEADS: Final = 3
#: Minimum number of calls after which precision can end a measurement, and the maximum that is added at random.
ENOUGH: Final = (9, 6)
#: Time by which a call after an empty kernel can exceed a plain one, in nanoseconds and as a share. The kernel takes
#: about 2 us, and a context switch on the GPU 280 us.
_IN_TURN_SLACK: Final = (10e3, 0.02)
#: Duration of calls in nanoseconds above which a context switch is too short to be seen.
LONG_NS: Final = 280e3 / _IN_TURN_SLACK[1]
#: Sufficient precision of the launch overhead relative to the precision of the calls.
_OVERHEAD_PART: Final = 0.25
#: Half width in nanoseconds at which any median is precise enough, because a GPU's clock is no finer.
_RESOLUTION_NS: Final = 500.0
#: Time in nanoseconds by which a candidate's overhead by the CPU's clock on a GPU can exceed the reference's.
_CPU_OVERHEAD_NS: Final = 50e3
#: Error in nanoseconds between two processes that wait for the GPU in their forwards, with six busy slots on an H100.
_WAITING_NS: Final = 35e3
#: Factor by which the mean of a kernel's calls can exceed their median more than the reference's does.
_SKEW: Final = 1.1
#: Share of the longest calls that does not count in that mean. Time slices of other contexts lengthened up to a third
#: of the calls of an honest kernel that uses several streams.
_TRIMMED: Final = 0.35
#: Number of bins of a histogram, and the number of interquartile ranges above the third quartile where its range ends.
_BINS: Final = 20
_FAR: Final = 3.0


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
        refuting_ns: half width of the judge's median at which it can refute the process's own clock.
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
    refuting_ns: float
    overhead_ns: float
    overheads_ns: float


_ERRORS: Final[dict[Basis, _Errors]] = {
    "gpu_clock": _Errors(
        outside=(2500.0, 0.005),
        own=(300.0, 0.005),
        agrees=(4e3, 0.02, 0.0, 1.0),
        most_ns=6e3,
        reference_ns=10e3,
        limit_ns=500e3,
        resolution_ns=150.0,
        refuting_ns=2e3,
        overhead_ns=1e3,
        overheads_ns=600.0,
    ),
    "cpu_clock": _Errors(
        outside=(20e3, 0.02),
        own=(3e3, 0.02),
        agrees=(20e3, 0.05, 3.0, 0.0),
        most_ns=100e3,
        reference_ns=300e3,
        limit_ns=5e6,
        resolution_ns=3e3,
        refuting_ns=math.inf,
        overhead_ns=math.inf,
        overheads_ns=30e3,
    ),
}


@dataclass(slots=True)
class Series:
    """Times in nanoseconds, including the launch overhead.

    Attributes:
        calls: the timed calls.
        overheads: overhead calls.
        yardsticks: the judge's own work inside the calls.
        own, own_overheads: times of the same calls by the process's own clock, which are not trusted, or -1.
        discarded: number of calls that do not count because the device was throttled.
        kept: times of the calls that are kept to be verified.
        in_turn: additional calls after an empty kernel.
        variants: calls on hidden variants.
        layouts: strides of the outputs of all calls.
        spared_ns: time that copying outputs of these strides saves over copying the reference's.
        empty_ns: time of one empty kernel if only the overhead calls contain it. It must not be subtracted.
    """

    basis: Basis
    calls: list[int] = field(default_factory=list[int])
    overheads: list[int] = field(default_factory=list[int])
    yardsticks: list[int] = field(default_factory=list[int])
    own: list[int] = field(default_factory=list[int])
    own_overheads: list[int] = field(default_factory=list[int])
    discarded: int = 0
    kept: list[int] = field(default_factory=list[int])
    in_turn: list[int] = field(default_factory=list[int])
    variants: list[int] = field(default_factory=list[int])
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
        """True if the calls did not wait for a time slice of the GPU."""
        if not (self.in_turn and self.calls):
            return False
        call = statistics.median(self.calls)
        return statistics.median(self.in_turn) > call + _IN_TURN_SLACK[0] + _IN_TURN_SLACK[1] * call

    @property
    def skew(self) -> float:
        """Mean of the calls divided by their median, without the longest few, which other processes cause."""
        ordered = sorted(self.calls)
        counted = ordered[: len(ordered) - int(_TRIMMED * len(ordered))]
        return statistics.fmean(counted) / statistics.median(ordered)

    def discard(self, last: int) -> None:
        """Discard the last calls, because the device was throttled."""
        if last:
            del self.calls[-last:], self.own[-last:]
            self.discarded += last

    def knows_overhead(self, wanted: float) -> bool:
        """Return whether the launch overhead is so precise that more measurements would not improve net times."""
        if self.basis != "gpu_clock" or len(self.overheads) < FEWEST_OVERHEADS or len(self.calls) < FEWEST:
            return False
        net = statistics.median(self.calls) - statistics.median(self.overheads)
        enough = _ERRORS[self.basis].overhead_ns if self.has_own else 0.0
        return half_width(self.overheads) <= max(_OVERHEAD_PART * wanted * net, enough)

    def is_precise(self, wanted: float) -> bool:
        """Return whether the median is as precise as wanted, or as the clock allows."""
        net, width = statistics.median(self.calls) - statistics.median(self.overheads), half_width(self.calls)
        errors = _ERRORS[self.basis]
        if wanted > 0 and net < errors.limit_ns and self.has_own:
            return half_width(self.own) <= max(wanted * net, errors.resolution_ns)
        return wanted > 0 and width <= max(wanted * net, _RESOLUTION_NS)


def enough(more: float) -> int:
    """Return the number of calls after which precision can end a measurement, for a random number below 1."""
    fewest, most_more = ENOUGH
    return fewest + int(more * most_more)


def is_settled(series: Series, reference: Series | None = None) -> bool:
    """Return whether the clock of a series' time is settled. If not, more calls and overhead calls are needed.

    A few overhead calls can all be too short or too long. Then they are longer than the calls by more than the clock's
    error, or the judge's clock does not confirm the process's own. Only a precise median refutes it: time slices of
    other contexts can lengthen most of a few calls.

    Args:
        reference: for a candidate, the series of the reference in turn with it.
    """
    both = [series] if reference is None else [series, reference]
    overhead = min(statistics.median(one.overheads) for one in both)
    net = statistics.median(series.calls) - overhead + series.empty_ns
    errors = _ERRORS[series.basis]
    if net < -errors.outside[0]:
        return len(series.calls) >= 2 * sum(ENOUGH)
    if series.basis != "gpu_clock" or net > errors.limit_ns or not series.has_own:
        return True
    excess, width = _excess_ns(series, net, reference), half_width(series.calls)
    return excess is None or width <= max(errors.refuting_ns, -excess)


def overhead_of(series: Series, slot: SlotConfig, baseline: Measurement | None = None) -> float:
    """Return the launch overhead of a series in nanoseconds: the median on a GPU, the minimum on a CPU.

    Other processes on a CPU make calls slower. If that were included in the overhead, net times would be too short or
    even negative.

    Args:
        series: the series of a candidate, which can have slowed its overhead calls, or of the reference.
        baseline: for a candidate, the reference's measurement. Its overhead counts if it is smaller, after subtracting
            the time that the judge's own work in the calls saves since then, and saves with these outputs' strides.
    """
    own = statistics.median(series.overheads) if slot.on_gpu else float(min(series.overheads))
    if baseline is None:
        return own
    then, now = baseline.yardstick_ms, series.yardstick_ms
    quicker = 0.0 if then is None or now is None else max(0.0, then - now)
    theirs = (baseline.null_ms - quicker) * 1e6 - series.spared_ns
    slack = _CPU_OVERHEAD_NS if slot.on_gpu and series.basis == "cpu_clock" else 0.0
    return max(0.0, own if own <= theirs + slack else theirs)


def summarise(
    series: Series,
    overhead_ns: float,
    timing: Timing,
    slot: SlotConfig,
    reference: Series | None = None,
    *,
    fine: bool = True,
) -> Measurement:
    """Return a series as a measurement in milliseconds, without the launch overhead.

    No call counts as shorter than the shortest kept call if even that took longer than the median. Otherwise a kernel
    could do its work in some calls only, and gain if by luck no other call was kept. For the same reason no call counts
    as shorter than the mean if the mean exceeds the median by far more than the reference's.

    Args:
        reference: for a candidate, the reference's series in turn with it, or None.
        fine: False to use the judge's clock in any case. A kernel and its baseline are compared by the same clock.
    """
    middle = statistics.median(series.calls)
    least = min(series.kept, default=0)
    if least <= middle:
        least = 0
    if reference is not None and series.skew > _SKEW * reference.skew:
        least = max(least, statistics.fmean(series.calls))
    taken = overhead_ns - series.empty_ns
    times = [max(call, least) - taken for call in series.calls]
    own = _own_times(series, middle - taken, reference) if fine and not least else None
    samples, (fixed, share) = (series.calls, series.overheads), _ERRORS[series.basis].outside
    if own is not None:
        times, samples, (fixed, share) = own, (series.own, series.own_overheads), _ERRORS[series.basis].own
    if slot.on_gpu and series.basis == "cpu_clock":
        fixed = max(fixed, _WAITING_NS)
    # The overhead's noise can exceed a short call, and no time is below zero.
    times = [max(0.0, each / 1e6) for each in times]
    q1, median, q3 = statistics.quantiles(times, n=4, method="inclusive")
    error_ms = math.hypot(*map(half_width, samples), fixed, share * median * 1e6) / 1e6
    return Measurement(
        basis=series.basis,
        count=len(times),
        discarded=series.discarded,
        precision=half_width(samples[0]) / 1e6 / median if median > 0 else None,
        low_ms=max(0.0, median - error_ms),
        high_ms=median + error_ms,
        is_fine=own is not None,
        yardstick_ms=series.yardstick_ms,
        median_ms=median,
        q1_ms=q1,
        q3_ms=q3,
        mean_ms=statistics.fmean(times),
        std_ms=statistics.stdev(times),
        min_ms=min(times),
        max_ms=max(times),
        null_ms=overhead_ns / 1e6,
        cold_l2=timing.cold_l2 and slot.on_gpu,
        clocks=Clocks.model_validate(series.clocks),
        histogram=_histogram(times, q3 + _FAR * (q3 - q1)),
        samples_ms=tuple(round(each, 6) for each in times),
    )


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
    outside_reference = statistics.median(reference.calls) - statistics.median(reference.overheads) + reference.empty_ns
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


def half_width(calls: list[int]) -> float:
    """Return half the width of the median's 95 % confidence interval, from order statistics."""
    ordered, count = sorted(calls), len(calls)
    low = max(0, math.floor(count / 2 - 0.98 * math.sqrt(count)))
    return (ordered[count - 1 - low] - ordered[low]) / 2
