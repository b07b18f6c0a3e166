"""Timed calls of one candidate: measuring, verifying and summarizing them.

Every call has new values. The outputs of each call are copied to memory that was allocated before the call. Some calls
are kept: when the candidate is gone, the reference draws their inputs again and answers them. A call is chosen after it
is over, so nothing that the candidate does before can depend on the choice. Each call is equally likely to be kept, and
the candidate does not know the number of calls: the expected share of wrong calls among the kept ones is the share
among all. Of large outputs only pieces at random positions are kept. A candidate that is right in some calls only, and
lucky, gains nothing either: no call counts as shorter than the shortest kept call (:func:`summarise`).

The launch overhead is subtracted from each time. It is the time of the same call with an empty kernel instead of a
forward. A candidate that slowed this measurement would look fast. Therefore the launch overhead is also measured in a
process that runs the reference, with the baseline. A candidate's own value counts only where it is smaller, which shows
that the device has become quieter since. The judge copies outputs with their strides. Where a candidate's strides make
the copy faster than the reference's, the reference's launch overhead is reduced by the difference.

The empty kernel needs a time slice of the GPU. A forward that launches no kernel needs none, and would look faster by
the cost of a context switch. Therefore some calls, chosen at random, are made after an empty kernel. If these take
longer by more than the kernel itself, all calls are made so.
"""

from __future__ import annotations

import contextlib
import gc
import math
import random
import statistics
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import torch

from kqueue.categories import Category
from kqueue.contract import Phase, Timing
from kqueue.evidence import Clocks, Histogram, Measurement
from workers.judge.channel.orders import Order
from workers.judge.channel.tensors import TensorSpec
from workers.judge.ending import EvaluationEnded
from workers.judge.pipeline import clocks, compare
from workers.judge.pipeline.cases import Case
from workers.judge.pipeline.clocks import CpuClock, GpuClock, Hold, Instruments, empty_kernel_ns
from workers.judge.pipeline.exchange import Exchange
from workers.judge.pipeline.reference import Reference
from workers.judge.slot_config import SlotConfig

Basis = Literal["gpu_clock", "cpu_clock"]

#: Version of this module's method, a part of the key under which baselines are cached.
METHOD: Final = "10"
#: Number of a candidate's launch-overhead measurements as a share of its calls.
OVERHEAD_SHARE: Final = 0.2
#: Minimum number of calls in a measurement, even if the time budget is exceeded.
_FEWEST: Final = 5
#: Minimum number of calls after which precision can end a measurement, and the maximum that is added at random. The
#: second pair is for calls on a GPU longer than the limit in nanoseconds (with the judge's own work), which vary less.
_ENOUGH: Final = (15, 8)
_ENOUGH_LONG: Final = (8, 5)
_LONG_CALL_NS: Final = 5e6
#: Share of the time phase's deadline after which no further call begins.
_BUDGET: Final = 0.6
#: Time by which a call after an empty kernel can exceed a plain one, in nanoseconds and as a share. The kernel takes
#: about 2 us, and a context switch on the GPU 280 us.
_IN_TURN_SLACK: Final = (10e3, 0.02)
#: Number of calls after an empty kernel as a share of the plain calls, their minimum number, and the duration of calls
#: in nanoseconds above which a context switch is too short to be seen.
_IN_TURN_SHARE: Final = 0.15
_FEWEST_IN_TURN: Final = 5
_LONG_NS: Final = 280e3 / _IN_TURN_SLACK[1]
#: Sufficient precision of the launch overhead relative to the precision of the calls.
_OVERHEAD_PART: Final = 0.25
#: Half width in nanoseconds at which any median is precise enough, because a GPU's clock is no finer.
_RESOLUTION_NS: Final = 500.0
#: Number of calls between two reads of the device's clocks.
_LOOK_EVERY: Final = 8
#: Maximum size in bytes of the outputs kept from a call, and the size of their pieces.
_KEPT_BYTES: Final = 64 << 20
_PIECE_BYTES: Final = 1 << 20
#: Maximum number of calls that are verified together, and maximum size in bytes of their outputs.
_MOST_TOGETHER: Final = 16
_TOGETHER_BYTES: Final = 256 << 20
#: Number of alternating measurements of copies with two layouts. Alternation exposes both to the same disturbances.
_COMPARISONS: Final = 4
#: Duration in seconds of drawing inputs above which the candidate's deadline is paused.
_SLOW_DRAW_S: Final = 0.02
#: Number of consecutive calls that a candidate fails to enqueue in time before its forward is assumed to wait for the
#: GPU.
_MISSES: Final = 3
#: Number of such calls in total for the same conclusion.
_MISSED: Final = 10
#: Number of bins of a histogram, and the number of interquartile ranges above the third quartile where its range ends.
_BINS: Final = 20
_FAR: Final = 3.0


@dataclass(slots=True)
class Series:
    """Times in nanoseconds, including the launch overhead."""

    basis: Basis
    calls: list[int] = field(default_factory=list[int])
    overheads: list[int] = field(default_factory=list[int])
    yardsticks: list[int] = field(default_factory=list[int])
    discarded: int = 0
    #: Times of the calls that are kept to be verified.
    kept: list[int] = field(default_factory=list[int])
    #: Times of the additional calls after an empty kernel.
    in_turn: list[int] = field(default_factory=list[int])
    #: Strides of the outputs of all calls, and the time in nanoseconds that copying them saves over the reference's.
    layouts: set[tuple[tuple[int, ...], ...]] = field(default_factory=set[tuple[tuple[int, ...], ...]])
    spared_ns: float = 0.0
    #: Time in nanoseconds of one empty kernel if only the overhead calls contain it. It must not be subtracted.
    empty_ns: float = 0.0
    clocks: dict[str, float | str | None] = field(default_factory=dict[str, float | str | None])

    @property
    def yardstick_ms(self) -> float | None:
        """Median time of the judge's own work inside the calls, or None by the CPU's clock."""
        return statistics.median(self.yardsticks) / 1e6 if self.basis == "gpu_clock" else None

    @property
    def takes_no_turn(self) -> bool:
        """True if the calls did not wait for a time slice of the GPU."""
        if not (self.in_turn and self.calls):
            return False
        call = statistics.median(self.calls)
        return statistics.median(self.in_turn) > call + _IN_TURN_SLACK[0] + _IN_TURN_SLACK[1] * call


@dataclass(slots=True)
class _Proof:
    """A call that is kept to be verified."""

    #: The candidate's outputs, or pieces of them, and the positions of the pieces, or None for whole outputs.
    outputs: list[torch.Tensor]
    pieces: list[list[slice]] | None
    #: How the inputs are drawn, and the seed of the forward.
    drawn: int
    on_device: bool
    seed: int
    #: Number of the call among those that could have been kept.
    number: int
    #: Time, or None if the call's series was replaced or the device was throttled.
    ns: int | None


def usual_calls(timing: Timing, overhead_share: float) -> int:
    """Return the number of input sets for a series that ends by precision."""
    calls = min(timing.calls, sum(_ENOUGH))
    return timing.warmup + math.ceil(calls * (1 + overhead_share + _IN_TURN_SHARE)) + _FEWEST


class Stopwatch:
    """Times the calls of one candidate."""

    def __init__(
        self,
        exchange: Exchange,
        reference: Reference,
        slot: SlotConfig,
        instruments: Instruments,
        proofs: int,
    ) -> None:
        """Prepare to time a process, and begin its time phase.

        ``proofs`` is the number of calls that are kept to be verified.
        """
        seconds = reference.settings.deadlines.time_s
        exchange.process.enter(Phase.TIME, seconds)
        self._exchange = exchange
        self._reference = reference
        self._slot = slot
        self._seconds = seconds
        self._hold = instruments.hold
        self._flusher = instruments.flusher
        self._watch = instruments.watch
        self._most = proofs
        self._random = random.SystemRandom()
        self._proofs: list[_Proof] = []
        self._series: Series | None = None
        self._is_cold = False
        #: Memory to which the outputs of each call are copied.
        self._into: list[torch.Tensor] = []
        #: Number of calls in all series that could have been kept. Being right in the last series only is not enough.
        self._counted = 0
        self._draw_s = 0.0
        #: Inputs of the last call.
        self._case: Case | None = None
        #: True if the timed process also draws the inputs, which pauses its deadline.
        self._draws_itself = exchange.process is reference.process
        self._left_s = seconds
        self._since = 0.0

    @property
    def _gpu_hold(self) -> Hold:
        assert self._hold is not None, "the slot has a GPU"
        return self._hold

    def blocks(self) -> bool:
        """Return whether the candidate's forward waits for the GPU."""
        self._since = time.monotonic()
        blocks = GpuClock(self._exchange, self._gpu_hold, None).blocks(self._fresh())
        self._exchange.process.stop_clock()
        return blocks

    def measure(self, timing: Timing, *, basis: Basis, overhead_share: float) -> Series:
        """Time calls until their median is known well enough. :meth:`verify` must be called afterwards.

        Args:
            basis: the clock. A candidate whose forward waits for the GPU is timed by ``cpu_clock``.
            overhead_share: overhead measurements for each call, made at random so that drift affects both alike.

        Raises:
            EvaluationEnded: a call failed, its outputs had another form than the reference's, or the device was
                throttled throughout (``timing_unstable``).
        """
        self._is_cold = timing.cold_l2
        flusher = self._flusher if timing.cold_l2 else None
        with _no_collections():
            self._into = self._make_room()
            self._exchange.process.start_clock()
            self._since = time.monotonic()
            enough_at = time.monotonic() + self._seconds * _BUDGET
            series, call = None, Order.ENQUEUE
            if basis == "gpu_clock":
                clock = GpuClock(self._exchange, self._gpu_hold, flusher)
                series = self._take(clock, timing, overhead_share, enough_at, call)
                if series is not None and series.takes_no_turn:
                    call = Order.ENQUEUE_IN_TURN
                    series = self._take(clock, timing, overhead_share, enough_at, call)
            if series is None:
                clock, call = CpuClock(self._exchange, flusher, on_gpu=self._slot.on_gpu), Order.TIME
                series = self._take(clock, timing, overhead_share, enough_at, call)
            assert series is not None
            self._series = series
            self._exchange.process.stop_clock()
            self._into = []
        series.kept = [proof.ns for proof in self._proofs if proof.ns is not None]
        series.clocks = self._watch.clocks()
        if len(series.calls) < _FEWEST:
            raise EvaluationEnded(
                Category.TIMING_UNSTABLE,
                f"the device was throttled in {series.discarded} of {series.discarded + len(series.calls)} calls",
                Phase.TIME,
                clocks=series.clocks,
            )
        if call is Order.ENQUEUE:
            series.empty_ns = empty_kernel_ns()
        return series

    def verify(self) -> int:
        """Answer the kept calls with the reference, compare them, and return their number.

        Float64 outputs can only excuse a kernel, so they are computed only where a call needs an excuse.

        Raises:
            EvaluationEnded: ``nondeterministic`` if a call was wrong although all checked calls were right.
        """
        kept, self._proofs = self._proofs, []
        reference = self._reference
        reference.oracle.reset_time()
        size = max(1, sum(tensor.nbytes for proof in kept[:1] for tensor in proof.outputs))
        together = max(1, min(_MOST_TOGETHER, _TOGETHER_BYTES // size)) if reference.cache.is_roomy else 1
        for begin in range(0, len(kept), together):
            proofs = kept[begin : begin + together]
            cases = [reference.cache.again(p.drawn, p.seed, on_device=p.on_device) for p in proofs]
            reference.answer(*cases, exactly=False)
            self._check(proofs, cases)
            reference.cache.drop(cases)
        return len(kept)

    @property
    def has_other_layouts(self) -> bool:
        """True if the outputs had other strides than the reference's, so that copies could have been faster."""
        return self._slot.on_gpu and any(self._other_layouts())

    def compare_layouts(self) -> None:
        """Measure the time that the judge's copies saved compared with copies of the reference's outputs.

        This needs the exclusive device and a candidate that has ended: a kernel would gain if copies of dense outputs
        looked slower than they are.
        """
        flusher = self._flusher if self._is_cold else None
        spared = 0.0
        for spec, strides, dense in self._other_layouts():
            both = [[clocks.copy_ns(spec, steps, flusher) for steps in (strides, dense)] for _ in range(_COMPARISONS)]
            least = [min(times) for times in zip(*both, strict=True)]
            spared += least[0] - least[1]
        assert self._series is not None
        self._series.spared_ns = max(0.0, spared)

    def _other_layouts(self) -> Iterator[tuple[TensorSpec, tuple[int, ...], tuple[int, ...]]]:
        """Yield spec, strides and dense strides of each reference output whose layout the candidate changed."""
        # Outputs in another layout than the reference's count as dense, which copies fastest, because a kernel can
        # choose another layout in each call.
        assert self._series is not None, "calls have been timed"
        layouts, reference = self._series.layouts, self._reference
        for number, (spec, strides) in enumerate(
            zip(reference.form.output_specs, reference.form.output_strides, strict=True)
        ):
            shape = spec.shape
            dense = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
            steps = _steps(shape, strides)
            differ = any(_steps(shape, layout[number]) != steps for layout in layouts)
            if differ and math.prod(shape) and steps != _steps(shape, dense):
                yield spec, strides, dense

    def _take(
        self, clock: GpuClock | CpuClock, timing: Timing, overhead_share: float, enough_at: float, call: Order
    ) -> Series | None:
        """Time a series of one kind of calls by one clock. Return None if the forward waits for the GPU."""
        overhead_order = Order.ENQUEUE_OVERHEAD if isinstance(clock, GpuClock) else Order.TIME_OVERHEAD
        series = Series(clock.basis)
        more = self._random.random()
        warming, misses, missed, since = timing.warmup, 0, 0, 0
        looks = call is Order.ENQUEUE
        self._discount(self._counted)
        while True:
            wants_overhead = self._random.random() < overhead_share or (
                warming == 0 and len(series.overheads) < _FEWEST
            )
            if wants_overhead and not _knows_overhead(series, timing.precision):
                sample = clock.time(overhead_order, self._for_overhead(clock), self._into)
                misses += sample is None
                if sample is not None and warming == 0:
                    series.overheads.append(sample[0])
                    series.yardsticks.append(sample[1])
            if looks and warming == 0 and self._random.random() < _IN_TURN_SHARE:
                looks = self._take_in_turn(clock, series)
            case = self._fresh()
            sample = clock.time(call, case, self._into)
            missed += sample is None
            misses = misses + 1 if sample is None else 0
            if misses >= _MISSES or missed >= _MISSED:
                return None
            if sample is None:
                continue
            if warming:
                warming -= 1
                continue
            self._keep(case, sample[0])
            series.layouts.add(tuple(tuple(view.stride()) for view in clock.views))
            series.calls.append(sample[0])
            series.yardsticks.append(sample[1])
            since += 1
            late = time.monotonic() > enough_at
            done = len(series.calls) >= timing.calls or (late and len(series.calls) >= _FEWEST)
            if not done and len(series.calls) >= _enough(series, more) and len(series.overheads) >= _FEWEST:
                done = _is_precise(series, timing.precision)
            if since >= _LOOK_EVERY or done:
                if self._watch.throttled():
                    del series.calls[-since:]
                    self._discount(since)
                    series.discarded += since
                    done = late or series.discarded >= timing.calls
                since = 0
            if done and len(series.overheads) >= _FEWEST:
                for _ in range(_FEWEST_IN_TURN - len(series.in_turn)):
                    looks = looks and self._take_in_turn(clock, series)
                return series

    def _take_in_turn(self, clock: GpuClock | CpuClock, series: Series) -> bool:
        """Make one call after an empty kernel. Return whether further such calls can show a difference."""
        sample = clock.time(Order.ENQUEUE_IN_TURN, self._fresh(), self._into)
        if sample is not None:
            series.in_turn.append(sample[0])
        return sample is None or sample[0] < _LONG_NS

    def _fresh(self) -> Case:
        """Return inputs that were never used. Pause the candidate's deadline while slow inputs are drawn."""
        slow = self._draw_s > _SLOW_DRAW_S
        if slow:
            self._exchange.process.stop_clock()
        begun = time.monotonic()
        # A longer time would have ended the process, so the host was paused.
        if (passed := begun - self._since) < self._left_s:
            self._left_s -= passed
        case = self._reference.cache.fresh()
        self._case = case
        self._since = time.monotonic()
        self._draw_s = self._since - begun
        if self._draws_itself:
            # Drawing was a separate phase, whose end stopped the clock.
            self._exchange.process.enter(Phase.TIME, max(self._left_s, 0.001))
        if slow or self._draws_itself:
            self._exchange.process.start_clock()
        return case

    def _for_overhead(self, clock: GpuClock | CpuClock) -> Case:
        """Return inputs for an overhead call: fresh ones, which no cache holds. Large ones are the last call's."""
        is_large = isinstance(clock, GpuClock) and not self._reference.cache.is_roomy
        return self._case if is_large and self._case is not None else self._fresh()

    def _make_room(self) -> list[torch.Tensor]:
        """Return memory for the outputs of calls, allocated and mapped in advance."""
        room = self._exchange.blanks()
        if not self._slot.on_gpu:
            for tensor in room:
                tensor.zero_()  # This makes Linux map the pages now.
        return room

    def _keep(self, case: Case, ns: int) -> None:
        """Keep a finished call with the same probability as any other call (reservoir sampling)."""
        self._counted += 1
        index = self._counted - 1 if self._counted <= self._most else self._random.randrange(self._counted)
        if index >= self._most:
            return
        outputs, pieces = self._into, None
        if (nbytes := sum(tensor.nbytes for tensor in outputs)) > _KEPT_BYTES:
            pieces = [self._pieces(tensor, _KEPT_BYTES / nbytes) for tensor in outputs]
            outputs = [_cut(tensor, where) for tensor, where in zip(outputs, pieces, strict=True)]
        elif self._slot.on_gpu:
            self._into = self._make_room()
        else:
            # On a CPU the calls of all series use the same memory, because other memory would be in other caches.
            outputs = [tensor.clone() for tensor in outputs]
        proof = _Proof(outputs, pieces, case.drawn, case.on_device, case.seed, self._counted, ns)
        self._proofs[index : index + 1] = [proof]

    def _pieces(self, tensor: torch.Tensor, share: float) -> list[slice]:
        """Choose random pieces of an output, which no process could predict while it was made."""
        size = min(_PIECE_BYTES // tensor.dtype.itemsize, tensor.numel())
        count = max(1, int(share * tensor.numel() / max(size, 1)))
        begins = (self._random.randrange(tensor.numel() - size + 1) for _ in range(count))
        return [slice(begin, begin + size) for begin in begins]

    def _discount(self, last: int) -> None:
        """Clear the times of the last calls among the kept ones, which are still verified."""
        for proof in self._proofs:
            if proof.number > self._counted - last:
                proof.ns = None

    def _check(self, proofs: Sequence[_Proof], cases: Sequence[Case]) -> None:
        """Compare the kept outputs of calls with the reference's outputs for their cases."""
        settings = self._reference.settings
        right = compare.need_no_excuse(_asked(proofs, cases), settings)
        doubtful = [pair for pair, is_right in zip(zip(proofs, cases, strict=True), right, strict=True) if not is_right]
        if not doubtful:
            return
        proofs, cases = zip(*doubtful, strict=True)
        self._reference.sharpen(cases)
        ends = compare.check_each(_asked(proofs, cases), settings)
        for proof, case, ended in zip(proofs, cases, ends, strict=True):
            if not isinstance(ended, EvaluationEnded):
                continue
            self._reference.confirm(case)
            facts = ended.outcome.facts.model_dump()
            if proof.pieces is not None:
                facts["map"] = None
                facts["first"] = [
                    wrong
                    | {"index": _index(wrong["index"], proof.pieces[facts["output"]], case.outputs[facts["output"]])}
                    for wrong in facts["first"]
                ]
            raise EvaluationEnded(
                Category.NONDETERMINISTIC,
                f"right when checked, wrong when timed: {ended.outcome.message}",
                Phase.TIME,
                **facts,
            )


def _asked(proofs: Sequence[_Proof], cases: Sequence[Case]) -> list[tuple[list[torch.Tensor], Case]]:
    """Return pairs of the kept outputs of a call and the case to compare them with."""
    return [(proof.outputs, _of_pieces(proof, case)) for proof, case in zip(proofs, cases, strict=True)]


def _of_pieces(proof: _Proof, case: Case) -> Case:
    """Return a case with the pieces of its outputs that correspond to the kept pieces of a call."""
    if proof.pieces is None:
        return case
    every = [case.outputs] if case.exact is None else [case.outputs, case.exact]
    cut = [[_cut(t, where) for t, where in zip(tensors, proof.pieces, strict=True)] for tensors in every]
    return replace(case, slot=None, inputs=[], outputs=cut[0], exact=cut[1] if len(cut) > 1 else None)


def _steps(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
    """Return the strides that determine the layout: only dimensions longer than one."""
    return [step for size, step in zip(shape, stride, strict=False) if size > 1]


def _cut(tensor: torch.Tensor, pieces: list[slice]) -> torch.Tensor:
    """Return pieces of a tensor's values, concatenated."""
    flat = tensor.reshape(-1)
    return torch.cat([flat[piece] for piece in pieces])


def _index(index: tuple[int, ...], pieces: list[slice], output: torch.Tensor) -> tuple[int, ...]:
    """Return the index in an output of a value found in its pieces. Complex values have one more index."""
    position = index[0]
    for piece in pieces:
        size = len(range(output.numel())[piece])
        if position < size:
            return (*compare.unravel(range(output.numel())[piece][position], tuple(output.shape)), *index[1:])
        position -= size
    raise AssertionError("the value's index is beyond the pieces")


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
    return max(0.0, min(own, (baseline.null_ms - quicker) * 1e6 - series.spared_ns))


def summarise(series: Series, overhead_ns: float, timing: Timing, slot: SlotConfig) -> Measurement:
    """Return a series as a measurement in milliseconds, without the launch overhead.

    No call counts as shorter than the shortest kept call if even that took longer than the median. Otherwise a kernel
    could do its work in some calls only, and gain if by luck no other call was kept.
    """
    taken = overhead_ns - series.empty_ns
    least = min(series.kept, default=0)
    if least <= statistics.median(series.calls):
        least = 0
    times = [(max(call, least) - taken) / 1e6 for call in series.calls]
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
        null_ms=overhead_ns / 1e6,
        cold_l2=timing.cold_l2 and slot.on_gpu,
        clocks=Clocks.model_validate(series.clocks),
        histogram=_histogram(times, q3 + _FAR * (q3 - q1)),
    )


def _histogram(times: list[float], far: float) -> Histogram:
    """Count times in bins of equal width from the shortest to the longest, or to ``far`` if some are longer."""
    low, high = min(times), min(max(times), far)
    counts = [0] * (_BINS if high > low else 1)
    for one in times:
        index = int(len(counts) * (one - low) / (high - low)) if high > low else 0
        counts[min(index, len(counts) - 1)] += 1
    return Histogram(low_ms=low, high_ms=high, counts=tuple(counts))


def _half_width(calls: list[int]) -> float:
    """Return half the width of the median's 95 % confidence interval, from order statistics."""
    ordered, count = sorted(calls), len(calls)
    low = max(0, math.floor(count / 2 - 0.98 * math.sqrt(count)))
    return (ordered[count - 1 - low] - ordered[low]) / 2


def _enough(series: Series, more: float) -> int:
    """Return the number of calls after which precision can end a series. ``more`` is its random number below 1."""
    is_long = series.basis == "gpu_clock" and statistics.median(series.calls) > _LONG_CALL_NS
    fewest, most_more = _ENOUGH_LONG if is_long else _ENOUGH
    return fewest + int(more * most_more)


def _knows_overhead(series: Series, wanted: float) -> bool:
    """Return whether the launch overhead is precise enough that more measurements would not improve net times."""
    if series.basis != "gpu_clock" or len(series.overheads) < _FEWEST or len(series.calls) < _FEWEST:
        return False
    net = statistics.median(series.calls) - statistics.median(series.overheads)
    return _half_width(series.overheads) <= _OVERHEAD_PART * wanted * net


def _is_precise(series: Series, wanted: float) -> bool:
    """Return whether the median is as precise as wanted, or as the clock allows."""
    net = statistics.median(series.calls) - statistics.median(series.overheads)
    return wanted > 0 and _half_width(series.calls) <= max(wanted * net, _RESOLUTION_NS)


@contextlib.contextmanager
def _no_collections() -> Generator[None]:
    """Disable garbage collection while calls are timed."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
