"""Many timed calls of one candidate, and what they say.

Every call has values of its own. Most are nobody's: only the form of their outputs is looked at. Some, chosen
at random, come from inputs whose answers are known, and are compared when all is over. To the candidate they
are all alike, and it does not know how many there will be.

From each time the *null* is taken away: the same call with an empty kernel instead of a forward. A candidate
that slowed its null would make itself look fast. So the null is also taken from a process that runs the
reference, with the baseline, and a candidate's own counts only where it is the smaller of the two: it then
tells of a device that has become quieter since.
"""

from __future__ import annotations

import contextlib
import gc
import math
import random
import statistics
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Final, Literal

import torch

from kqueue.categories import Category
from kqueue.contract import Measurement, Phase, Timing
from workers.channel.protocol import Order
from workers.gpu import environment
from workers.judge import compare
from workers.judge.clocks import CpuClock, Flusher, GpuClock, empty_kernel_ns
from workers.judge.ending import EvaluationEnded
from workers.judge.problem import Case, Problem
from workers.judge.session import Session
from workers.slot import Slot

Basis = Literal["gpu_clock", "cpu_clock"]

#: Part of the key under which baselines are cached: changes when this module's method does.
METHOD: Final = "3"
#: The fewest calls that make a measurement; below that the time budget does not end it.
_FEWEST: Final = 5
#: The fewest calls after which precision may end it, and up to how many are added at random.
_ENOUGH: Final = 15
_MORE: Final = 8
#: The share of the time phase's deadline after which no further call is begun.
_BUDGET: Final = 0.6
#: The share of calls whose answers are known.
_KNOWN: Final = 0.3
#: Of those at least so many before precision may end a measurement.
_PROVEN: Final = 4
#: A median that is known to this is known well enough whatever its size: a clock on a GPU ticks no finer.
_RESOLUTION_NS: Final = 500.0
#: Outputs of timed calls that are kept to be compared later, in bytes; further ones are compared at once.
_KEPT_BYTES: Final = 1 << 30
#: Calls between two looks at the device's clocks.
_LOOK_EVERY: Final = 8
#: Calls that a candidate may fail to enqueue in time before its forward is taken to wait for the GPU.
_MISSES: Final = 3


@dataclass(slots=True)
class Series:
    """Times in nanoseconds, the null not subtracted."""

    basis: Basis
    calls: list[int] = field(default_factory=list[int])
    nulls: list[int] = field(default_factory=list[int])
    yardsticks: list[int] = field(default_factory=list[int])
    discarded: int = 0
    #: What one empty kernel takes: it is in the null and must not be taken from the calls.
    empty_ns: float = 0.0
    clocks: dict[str, float | str | None] = field(default_factory=dict[str, float | str | None])

    @property
    def yardstick_ms(self) -> float | None:
        """Median of the judge's own work inside the calls; None by the CPU's clock."""
        return statistics.median(self.yardsticks) / 1e6 if self.basis == "gpu_clock" else None


class Stopwatch:
    """Times the calls of one candidate."""

    def __init__(
        self,
        session: Session,
        problem: Problem,
        known: list[Case],
        slot: Slot,
        seconds: float,
        flusher: Flusher | None,
        watch: environment.Watch,
    ) -> None:
        """Make ready.

        Args:
            session: the candidate, in its time phase.
            problem: gives the values of the other calls.
            known: input sets with answers, which the candidate has not seen.
            slot: where it runs.
            seconds: deadline of the time phase.
            flusher: empties the L2 cache, on a GPU.
            watch: sees whether the device is throttled.
        """
        self._flusher = flusher
        self._watch = watch
        self._session = session
        self._problem = problem
        self._known = known
        self._slot = slot
        self._seconds = seconds
        self._random = random.SystemRandom()
        self._kept: list[tuple[list[torch.Tensor], Case]] = []
        self._kept_bytes = 0

    def blocks(self) -> bool:
        """Whether the candidate's forward waits for the GPU."""
        with contextlib.closing(GpuClock(self._session, None)) as clock:
            return clock.blocks(self._problem.fresh())

    def measure(self, timing: Timing, *, basis: Basis, null_share: float) -> Series:
        """Time calls until their median is known well enough, at most ``timing.calls``.

        Args:
            timing: how many, how precisely, cold or warm.
            basis: the clock. A candidate whose forward turns out to wait for the GPU is timed by ``cpu_clock``.
            null_share: nulls for each call, beside it at random, so that drift meets both.

        Returns:
            the times; :meth:`verify` is still to be called.

        Raises:
            EvaluationEnded: a call failed or its outputs did not have the reference's form; or
                ``timing_unstable``: the device was throttled throughout.
        """
        flusher = self._flusher if timing.cold_l2 else None
        with _no_collections():
            self._session.process.start_clock()
            series = None
            if basis == "gpu_clock":
                with contextlib.closing(GpuClock(self._session, flusher)) as clock:
                    series = self._take(clock, timing, null_share)
            if series is None:
                clock = CpuClock(self._session, flusher, on_gpu=self._slot.on_gpu)
                series = self._take(clock, timing, null_share)
            assert series is not None
            self._session.process.stop_clock()
        series.clocks = self._watch.clocks()
        if len(series.calls) < _FEWEST:
            raise EvaluationEnded(
                Category.TIMING_UNSTABLE,
                f"the device was throttled in {series.discarded} of {series.discarded + len(series.calls)} calls",
                Phase.TIME,
                clocks=series.clocks,
            )
        if self._slot.on_gpu:
            series.empty_ns = empty_kernel_ns()
        return series

    def verify(self) -> None:
        """Compare what the timed calls with known answers returned; the device need not be had alone for it.

        Raises:
            EvaluationEnded: ``nondeterministic``: a call was wrong although all checked calls were right.
        """
        for outputs, case in self._kept:
            self._check(outputs, case)
        self._kept.clear()

    def _take(self, clock: GpuClock | CpuClock, timing: Timing, null_share: float) -> Series | None:
        """A series by one clock; None if the candidate's forward waits for the GPU."""
        ahead = isinstance(clock, GpuClock)
        call, null = (Order.AHEAD, Order.AHEAD_NULL) if ahead else (Order.TIME, Order.TIME_NULL)
        series = Series(clock.basis)
        blanks = self._session.blanks()
        unused = list(self._known)
        enough = min(timing.calls, _ENOUGH + self._random.randrange(_MORE))
        misses, since = 0, 0
        begun = time.monotonic()
        warming = timing.warmup
        while True:
            if self._random.random() < null_share or len(series.nulls) < _FEWEST * bool(warming == 0):
                sample = clock.time(null, self._problem.fresh(), blanks)
                if sample is not None and warming == 0:
                    series.nulls.append(sample[0])
                    series.yardsticks.append(sample[1])
            proven = len(self._known) - len(unused) >= min(_PROVEN, len(self._known))
            known = self._random.random() < _KNOWN or (not proven and len(series.calls) >= timing.calls)
            again = known and not unused
            case = self._problem.fresh()
            if known:
                case = unused.pop() if unused else self._random.choice(self._known)
            into = self._session.blanks() if known else blanks
            sample = clock.time(call, case, into)
            if sample is None:
                misses += 1
                if misses >= _MISSES:
                    return None
                continue
            if known:
                self._keep(into, case)
            if warming:
                warming -= 1
                continue
            # A case that was used before may be remembered: its time would not be one of an honest call.
            if not again:
                series.calls.append(sample[0])
                series.yardsticks.append(sample[1])
                since += 1
            late = time.monotonic() - begun > self._seconds * _BUDGET
            done = (proven and len(series.calls) >= timing.calls) or (late and len(series.calls) >= _FEWEST)
            if not done and len(series.calls) >= enough and proven:
                done = _is_precise(series, timing.precision)
            if since >= _LOOK_EVERY or done:
                if self._watch.throttled():
                    del series.calls[-since:]
                    series.discarded += since
                    done = late or series.discarded >= timing.calls
                since = 0
            if done:
                return series

    def _keep(self, outputs: list[torch.Tensor], case: Case) -> None:
        self._kept_bytes += sum(output.nbytes for output in outputs)
        if self._kept_bytes > _KEPT_BYTES:
            self._check(outputs, case)
        else:
            self._kept.append((outputs, case))

    def _check(self, outputs: list[torch.Tensor], case: Case) -> None:
        try:
            compare.check_values(outputs, case, self._session.settings)
        except EvaluationEnded as ended:
            raise EvaluationEnded(
                Category.NONDETERMINISTIC,
                f"right when checked, wrong when timed: {ended.outcome.message}",
                Phase.TIME,
                **ended.outcome.facts,
            ) from None


def null_of(series: Series, slot: Slot) -> float:
    """The null of a series, in nanoseconds: the median; on a CPU, whose cores others use, the least.

    What others take there is added to calls, never taken from them: a null that held it would make times
    too short, even negative.
    """
    return statistics.median(series.nulls) if slot.on_gpu else float(min(series.nulls))


def summarise(series: Series, null_ns: float, timing: Timing, slot: Slot) -> Measurement:
    """A series as a measurement in milliseconds, the null subtracted."""
    taken = null_ns - series.empty_ns
    times = [(call - taken) / 1e6 for call in series.calls]
    q1, median, q3 = statistics.quantiles(times, n=4, method="inclusive")
    return Measurement(
        basis=series.basis,
        count=len(times),
        discarded=series.discarded,
        precision=_half_width(series.calls) / 1e6 / median if median > 0 else None,
        yardstick_ms=series.yardstick_ms,
        median_ms=median,
        q1_ms=q1,
        q3_ms=q3,
        mean_ms=statistics.fmean(times),
        std_ms=statistics.stdev(times),
        min_ms=min(times),
        max_ms=max(times),
        null_ms=null_ns / 1e6,
        cold_l2=timing.cold_l2 and slot.on_gpu,
        clocks=series.clocks,
    )


def _half_width(calls: list[int]) -> float:
    """Half the width of the median's 95 % confidence interval, by the order of the calls."""
    ordered, count = sorted(calls), len(calls)
    low = max(0, math.floor(count / 2 - 0.98 * math.sqrt(count)))
    return (ordered[count - 1 - low] - ordered[low]) / 2


def _is_precise(series: Series, wanted: float) -> bool:
    """Whether the median is known as well as wanted, or as well as the clock allows."""
    net = statistics.median(series.calls) - statistics.median(series.nulls)
    return wanted > 0 and _half_width(series.calls) <= max(wanted * net, _RESOLUTION_NS)


@contextlib.contextmanager
def _no_collections() -> Generator[None]:
    """Keep the garbage collector out of what is timed."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
