"""Many timed calls of one candidate, and what they say.

Every call has values of its own. Of those that count some are kept: when the candidate is gone the reference draws
their inputs again and answers them. A call is chosen when it is over, so nothing that the candidate sees or does before
can depend on it: the outputs of every call are copied to room that was made before it. Each call is as likely to be
kept in the end as any other, and the candidate does not know how many there will be: whatever share of them it gets
wrong, the same share of those that are kept is likely to be. Of large outputs pieces are kept, at random places. A
candidate that is right in some calls only, and lucky, gains nothing either: no call counts as shorter than the shortest
that was kept (:func:`summarise`).

From each time the *null* is taken away: the same call with an empty kernel instead of a forward. A candidate
that slowed its null would make itself look fast. So the null is also taken from a process that runs the
reference, with the baseline, and a candidate's own counts only where it is the smaller of the two: it then
tells of a device that has become quieter since. The judge copies outputs as they lie. Where a candidate's lie so that
this takes less than with the reference's, the reference's null counts as so much shorter.

A null takes its turn on a GPU's processors; a forward that launches nothing there takes none, and would look
faster by what a turn costs. So some calls are made behind an empty kernel, at random: if they take longer by more
than it does, all are.
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
from workers.judge.channel.protocol import Order, TensorSpec
from workers.judge.ending import EvaluationEnded
from workers.judge.gpu import environment
from workers.judge.pipeline import clocks, compare
from workers.judge.pipeline.cases import Case
from workers.judge.pipeline.clocks import CpuClock, Flusher, GpuClock, Hold, empty_kernel_ns
from workers.judge.pipeline.exchange import Exchange
from workers.judge.pipeline.reference import Reference
from workers.judge.slot_config import SlotConfig

Basis = Literal["gpu_clock", "cpu_clock"]

#: Part of the key under which baselines are cached: changes when this module's method does.
METHOD: Final = "10"
#: The fewest calls that make a measurement; below that the time budget does not end it.
_FEWEST: Final = 5
#: The fewest calls after which precision may end it, and up to how many are added at random; and where calls take long
#: on a GPU (in nanoseconds, the judge's own work included), which vary by less.
_ENOUGH: Final = (15, 8)
_ENOUGH_LONG: Final = (8, 5)
_LONG_CALL_NS: Final = 5e6
#: The share of the time phase's deadline after which no further call is begun.
_BUDGET: Final = 0.6
#: What calls behind an empty kernel may take longer, in nanoseconds and as a share: the kernel takes about 2 us, a turn
#: on the GPU's processors 280.
_IN_TURN_SLACK: Final = (10e3, 0.02)
#: Such calls for each that is not one; how many of them there are at least; and how long calls are in which no turn
#: could be seen, in nanoseconds.
_IN_TURN_SHARE: Final = 0.15
_FEWEST_IN_TURN: Final = 5
_LONG_NS: Final = 280e3 / _IN_TURN_SLACK[1]
#: How well the null must be known, as a share of how well the calls must be, for no more of them to be made.
_OVERHEAD_PART: Final = 0.25
#: A median that is known to this is known well enough whatever its size: a clock on a GPU ticks no finer.
_RESOLUTION_NS: Final = 500.0
#: Calls between two looks at the device's clocks.
_LOOK_EVERY: Final = 8
#: What is kept of a call's outputs, at most, and in pieces of how much, in bytes.
_KEPT_BYTES: Final = 64 << 20
_PIECE_BYTES: Final = 1 << 20
#: Calls that are verified together, and what their answers may take, in bytes.
_MOST_TOGETHER: Final = 16
_TOGETHER_BYTES: Final = 256 << 20
#: How often copies of outputs that lie in two ways are measured, in turn: what disturbs one meets the other too.
_COMPARISONS: Final = 4
#: Making inputs for longer than this is not on the candidate's time, in seconds.
_SLOW_DRAW_S: Final = 0.02
#: Calls in a row that a candidate may fail to enqueue in time before its forward is taken to wait for the GPU.
_MISSES: Final = 3
#: And all in all.
_MISSED: Final = 10
#: Bins of a histogram, and the quartiles' distances beyond the third from which calls count in its last bin.
_BINS: Final = 20
_FAR: Final = 3.0


@dataclass(slots=True)
class Series:
    """Times in nanoseconds, the null not subtracted."""

    basis: Basis
    calls: list[int] = field(default_factory=list[int])
    overheads: list[int] = field(default_factory=list[int])
    yardsticks: list[int] = field(default_factory=list[int])
    discarded: int = 0
    #: Of the calls, those that are kept to be verified.
    kept: list[int] = field(default_factory=list[int])
    #: Calls behind an empty kernel, beside those that are not.
    in_turn: list[int] = field(default_factory=list[int])
    #: The strides of the outputs, of all calls; what copying them takes less than copying the reference's.
    layouts: set[tuple[tuple[int, ...], ...]] = field(default_factory=set[tuple[tuple[int, ...], ...]])
    spared_ns: float = 0.0
    #: What one empty kernel takes where it is in the null and not in the calls: it must not be taken from them.
    empty_ns: float = 0.0
    clocks: dict[str, float | str | None] = field(default_factory=dict[str, float | str | None])

    @property
    def yardstick_ms(self) -> float | None:
        """Median of the judge's own work inside the calls; None by the CPU's clock."""
        return statistics.median(self.yardsticks) / 1e6 if self.basis == "gpu_clock" else None

    @property
    def takes_no_turn(self) -> bool:
        """Whether the calls did not wait for the GPU's processors."""
        if not (self.in_turn and self.calls):
            return False
        call = statistics.median(self.calls)
        return statistics.median(self.in_turn) > call + _IN_TURN_SLACK[0] + _IN_TURN_SLACK[1] * call


@dataclass(slots=True)
class _Proof:
    """A call that is kept to be verified.

    Attributes:
        outputs: what the candidate answered, or pieces of it.
        pieces: where in the reference's answer these lie; None for all of it.
        drawn, on_device, seed: what it was asked: how its inputs are drawn, and the seed of the forward.
        number: which it was of those that could have been kept.
        ns: its time, where that counts: its series is the last one, and the device was not throttled.
    """

    outputs: list[torch.Tensor]
    pieces: list[list[slice]] | None
    drawn: int
    on_device: bool
    seed: int
    number: int
    ns: int | None


def usual_calls(timing: Timing, overhead_share: float) -> int:
    """Return how many input sets a series takes whose precision ends it; one of ``null_share`` nulls for each call."""
    calls = min(timing.calls, sum(_ENOUGH))
    return timing.warmup + math.ceil(calls * (1 + overhead_share + _IN_TURN_SHARE)) + _FEWEST


class Stopwatch:
    """Times the calls of one candidate."""

    def __init__(
        self,
        exchange: Exchange,
        reference: Reference,
        slot: SlotConfig,
        seconds: float,
        hold: Hold | None,
        flusher: Flusher | None,
        watch: environment.Watch,
        proofs: int,
    ) -> None:
        """Make ready.

        Args:
            exchange: the process, in its time phase.
            reference: gives the values of the calls, and answers those that are kept.
            slot: where it runs.
            seconds: deadline of the time phase.
            hold, flusher: hold the judge's stream, and empty the L2 cache, on a GPU.
            watch: sees whether the device is throttled.
            proofs: how many calls are kept to be verified.
        """
        self._exchange = exchange
        self._reference = reference
        self._slot = slot
        self._seconds = seconds
        self._hold = hold
        self._flusher = flusher
        self._watch = watch
        self._most = proofs
        self._random = random.SystemRandom()
        self._proofs: list[_Proof] = []
        self._series: Series | None = None
        self._is_cold = False
        #: Where the outputs of every call are copied to.
        self._into: list[torch.Tensor] = []
        #: Calls that could have been kept, of all series: a kernel must not be right in the last one only.
        self._counted = 0
        self._draw_s = 0.0
        #: The inputs of the last call.
        self._case: Case | None = None
        #: Whether the timed process draws the inputs too: its time to be timed stands still meanwhile.
        self._draws_itself = exchange.process is reference.process
        self._left_s = seconds
        self._since = 0.0

    @property
    def _gpu_hold(self) -> Hold:
        assert self._hold is not None, "there is a GPU"
        return self._hold

    def blocks(self) -> bool:
        """Whether the candidate's forward waits for the GPU."""
        self._since = time.monotonic()
        blocks = GpuClock(self._exchange, self._gpu_hold, None).blocks(self._fresh())
        self._exchange.process.stop_clock()
        return blocks

    def measure(self, timing: Timing, *, basis: Basis, overhead_share: float) -> Series:
        """Time calls until their median is known well enough, at most ``timing.calls``.

        Args:
            timing: how many, how precisely, cold or warm.
            basis: the clock. A candidate whose forward turns out to wait for the GPU is timed by ``cpu_clock``.
            overhead_share: nulls for each call, beside it at random, so that drift meets both.

        Returns:
            the times; :meth:`verify` is still to be called.

        Raises:
            EvaluationEnded: a call failed or its outputs did not have the reference's form; or
                ``timing_unstable``: the device was throttled throughout.
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
        """Have the reference answer the calls that were kept, and compare. The candidate is not needed for it.

        Answers in float64 can only excuse a kernel: they are asked for where one needs that.

        Returns:
            how many they were.

        Raises:
            EvaluationEnded: ``nondeterministic``: a call was wrong although all checked calls were right.
        """
        kept, self._proofs = self._proofs, []
        reference = self._reference
        reference.allow_exact()
        size = max(1, sum(tensor.nbytes for proof in kept[:1] for tensor in proof.outputs))
        together = max(1, min(_MOST_TOGETHER, _TOGETHER_BYTES // size)) if reference.is_roomy else 1
        for begin in range(0, len(kept), together):
            proofs = kept[begin : begin + together]
            cases = [reference.again(p.drawn, p.seed, on_device=p.on_device) for p in proofs]
            reference.answer(*cases, exactly=False)
            self._check(proofs, cases)
            reference.drop(cases)
        return len(kept)

    @property
    def has_other_layouts(self) -> bool:
        """Whether copies of outputs may have taken less than those of the reference's, which lie in another way."""
        return self._slot.on_gpu and any(self._other_layouts())

    def compare_layouts(self) -> None:
        """Find what the judge's copies took less than they do of the reference's outputs.

        The device is had alone, and the candidate is gone: whatever makes copies of dense outputs look dearer than they
        are would be its gain.
        """
        flusher = self._flusher if self._is_cold else None
        spared = 0.0
        for spec, theirs, dense in self._other_layouts():
            both = [[clocks.copy_ns(spec, steps, flusher) for steps in (theirs, dense)] for _ in range(_COMPARISONS)]
            least = [min(times) for times in zip(*both, strict=True)]
            spared += least[0] - least[1]
        assert self._series is not None
        self._series.spared_ns = max(0.0, spared)

    def _other_layouts(self) -> Iterator[tuple[TensorSpec, tuple[int, ...], tuple[int, ...]]]:
        """Yield each of the reference's outputs that is not dense where a call's lay otherwise: its strides, and dense.

        Outputs that lie in another way than the reference's count as dense ones, which take least: a kernel may choose
        how its outputs lie, in each call.
        """
        assert self._series is not None, "calls have been timed"
        layouts, reference = self._series.layouts, self._reference
        for number, (spec, theirs) in enumerate(zip(reference.output_specs, reference.output_strides, strict=True)):
            shape = spec.shape
            dense = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
            steps = _steps(shape, theirs)
            differ = any(_steps(shape, layout[number]) != steps for layout in layouts)
            if differ and math.prod(shape) and steps != _steps(shape, dense):
                yield spec, theirs, dense

    def _take(
        self, clock: GpuClock | CpuClock, timing: Timing, overhead_share: float, enough_at: float, call: Order
    ) -> Series | None:
        """A series of one kind of calls by one clock; None if the candidate's forward waits for the GPU."""
        null = Order.ENQUEUE_OVERHEAD if isinstance(clock, GpuClock) else Order.TIME_OVERHEAD
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
                sample = clock.time(null, self._for_overhead(clock), self._into)
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
        """One call behind an empty kernel; returns whether more of them can tell anything."""
        sample = clock.time(Order.ENQUEUE_IN_TURN, self._fresh(), self._into)
        if sample is not None:
            series.in_turn.append(sample[0])
        return sample is None or sample[0] < _LONG_NS

    def _fresh(self) -> Case:
        """Inputs that were never used. Where they take long to make, the candidate's time stands still."""
        slow = self._draw_s > _SLOW_DRAW_S
        if slow:
            self._exchange.process.stop_clock()
        begun = time.monotonic()
        if (passed := begun - self._since) < self._left_s:  # else the process would have been ended: it was a pause
            self._left_s -= passed
        case = self._reference.fresh()
        self._case = case
        self._since = time.monotonic()
        self._draw_s = self._since - begun
        if self._draws_itself:
            # Drawing was a phase of its own, whose end stopped the clock.
            self._exchange.process.enter(Phase.TIME, max(self._left_s, 0.001))
        if slow or self._draws_itself:
            self._exchange.process.start_clock()
        return case

    def _for_overhead(self, clock: GpuClock | CpuClock) -> Case:
        """Inputs for a null: fresh ones, which are no nearer to anybody's cache than a call's.

        Where they are too large to be drawn ahead they are the last call's, as nothing is computed from them.
        """
        is_large = isinstance(clock, GpuClock) and not self._reference.is_roomy
        return self._case if is_large and self._case is not None else self._fresh()

    def _make_room(self) -> list[torch.Tensor]:
        """Return memory for the outputs of calls, which no call has to wait for."""
        room = self._exchange.blanks()
        if not self._slot.on_gpu:
            for tensor in room:
                tensor.zero_()  # Linux finds its pages now
        return room

    def _keep(self, case: Case, ns: int) -> None:
        """Keep a call that is over, or do not, so that of all calls each is as likely to stay as any other.

        On a CPU all calls of all series are copied to the same memory: other memory would be in other caches.
        """
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
            outputs = [tensor.clone() for tensor in outputs]
        proof = _Proof(outputs, pieces, case.drawn, case.on_device, case.seed, self._counted, ns)
        self._proofs[index : index + 1] = [proof]

    def _pieces(self, tensor: torch.Tensor, share: float) -> list[slice]:
        """Choose pieces of an output, a share of it: places that nobody knew while it was made."""
        size = min(_PIECE_BYTES // tensor.dtype.itemsize, tensor.numel())
        count = max(1, int(share * tensor.numel() / max(size, 1)))
        begins = (self._random.randrange(tensor.numel() - size + 1) for _ in range(count))
        return [slice(begin, begin + size) for begin in begins]

    def _discount(self, last: int) -> None:
        """Forget the times of those that are kept of the last calls; they are verified all the same."""
        for proof in self._proofs:
            if proof.number > self._counted - last:
                proof.ns = None

    def _check(self, proofs: Sequence[_Proof], cases: Sequence[Case]) -> None:
        """Compare what was kept of calls with the reference's answers to their cases."""
        settings = self._reference.settings
        right = compare.need_no_excuse(_asked(proofs, cases), settings)
        doubtful = [pair for pair, is_right in zip(zip(proofs, cases, strict=True), right, strict=True) if not is_right]
        if not doubtful:
            return
        proofs, cases = zip(*doubtful, strict=True)
        self._reference.sharpen(cases)
        found = compare.check_each(_asked(proofs, cases), settings)
        for proof, case, ended in zip(proofs, cases, found, strict=True):
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
    """Return what was kept of calls, and beside it what is to be compared with it."""
    return [(proof.outputs, _of_pieces(proof, case)) for proof, case in zip(proofs, cases, strict=True)]


def _of_pieces(proof: _Proof, case: Case) -> Case:
    """Return a case with those pieces of its answers that were kept of a call's."""
    if proof.pieces is None:
        return case
    every = [case.outputs] if case.exact is None else [case.outputs, case.exact]
    cut = [[_cut(t, where) for t, where in zip(tensors, proof.pieces, strict=True)] for tensors in every]
    return replace(case, slot=None, inputs=[], outputs=cut[0], exact=cut[1] if len(cut) > 1 else None)


def _steps(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
    """Return the strides that say where values lie: not those of dimensions of length one or zero."""
    return [step for size, step in zip(shape, stride, strict=False) if size > 1]


def _cut(tensor: torch.Tensor, pieces: list[slice]) -> torch.Tensor:
    """Return pieces of a tensor's values, one behind the other."""
    flat = tensor.reshape(-1)
    return torch.cat([flat[piece] for piece in pieces])


def _index(index: tuple[int, ...], pieces: list[slice], output: torch.Tensor) -> tuple[int, ...]:
    """Return where in an output a value lies that was found in its pieces. Complex ones have an index more."""
    position = index[0]
    for piece in pieces:
        size = len(range(output.numel())[piece])
        if position < size:
            return (*compare.unravel(range(output.numel())[piece][position], tuple(output.shape)), *index[1:])
        position -= size
    raise AssertionError("a value beyond the pieces")


def overhead_of(series: Series, slot: SlotConfig, baseline: Measurement | None = None) -> float:
    """The null of a series, in nanoseconds: the median; on a CPU, whose cores others use, the least.

    What others take there is added to calls, never taken from them: a null that held it would make times
    too short, even negative.

    Args:
        series: a candidate's, which may have slowed its nulls, or the reference's.
        slot: where it ran.
        baseline: for a candidate, what was measured with the reference. Its null counts where it is smaller, less
            what the judge's own work in the calls has become faster by since, and takes less with these outputs.
    """
    own = statistics.median(series.overheads) if slot.on_gpu else float(min(series.overheads))
    if baseline is None:
        return own
    then, now = baseline.yardstick_ms, series.yardstick_ms
    quicker = 0.0 if then is None or now is None else max(0.0, then - now)
    return max(0.0, min(own, (baseline.null_ms - quicker) * 1e6 - series.spared_ns))


def summarise(series: Series, overhead_ns: float, timing: Timing, slot: SlotConfig) -> Measurement:
    """A series as a measurement in milliseconds, the null subtracted.

    No call counts as shorter than the shortest that was kept, where even that took longer than the median: a kernel
    that does its work in some calls only, and is lucky that no other was kept, is measured by those.
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
    """Count times in bins of equal width from the shortest to the longest, or to ``far`` where some lie beyond."""
    low, high = min(times), min(max(times), far)
    counts = [0] * (_BINS if high > low else 1)
    for one in times:
        index = int(len(counts) * (one - low) / (high - low)) if high > low else 0
        counts[min(index, len(counts) - 1)] += 1
    return Histogram(low_ms=low, high_ms=high, counts=tuple(counts))


def _half_width(calls: list[int]) -> float:
    """Half the width of the median's 95 % confidence interval, by the order of the calls."""
    ordered, count = sorted(calls), len(calls)
    low = max(0, math.floor(count / 2 - 0.98 * math.sqrt(count)))
    return (ordered[count - 1 - low] - ordered[low]) / 2


def _enough(series: Series, more: float) -> int:
    """Return how many calls precision may end; ``more`` is a random number below 1, and one for a series."""
    is_long = series.basis == "gpu_clock" and statistics.median(series.calls) > _LONG_CALL_NS
    fewest, most_more = _ENOUGH_LONG if is_long else _ENOUGH
    return fewest + int(more * most_more)


def _knows_overhead(series: Series, wanted: float) -> bool:
    """Whether the null is known so well that more of them would tell nothing of the calls' own time."""
    if series.basis != "gpu_clock" or len(series.overheads) < _FEWEST or len(series.calls) < _FEWEST:
        return False
    net = statistics.median(series.calls) - statistics.median(series.overheads)
    return _half_width(series.overheads) <= _OVERHEAD_PART * wanted * net


def _is_precise(series: Series, wanted: float) -> bool:
    """Whether the median is known as well as wanted, or as well as the clock allows."""
    net = statistics.median(series.calls) - statistics.median(series.overheads)
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
