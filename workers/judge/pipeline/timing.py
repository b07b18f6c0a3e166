"""Timed calls of a candidate and of the reference, in turns.

Every call has new values. The outputs of each call are copied to memory that was allocated before the call. Some calls
are kept and verified later (:mod:`workers.judge.pipeline.kept`). Calls on hidden variants are made at random positions
by the same orders, and are all verified. A candidate that is right in some calls only, and lucky, gains nothing either:
no call counts as shorter than the shortest kept call (:func:`.estimator.summarise`).

Candidate and reference are called in turns, in random order, while this slot has the device for itself. So both meet
the same clocks, temperature and neighbours.

The launch overhead is subtracted from each time. It is the time of the same call with an empty kernel instead of a
forward. A candidate that slowed this measurement would look fast. Therefore the launch overhead is also measured in a
process that runs the reference. A candidate's own value counts only where it is smaller, which shows that the device
has become quieter since. The judge copies outputs with their strides. Where a candidate's strides make the copy faster
than the reference's, the reference's launch overhead is reduced by the difference.

The empty kernel needs a time slice of the GPU. A forward that launches no kernel needs none, and would look faster by
the cost of a context switch. Therefore some calls, chosen at random, are made after an empty kernel. If these take
longer by more than the kernel itself, or overhead calls take longer, all calls are made so.
"""

from __future__ import annotations

import contextlib
import gc
import math
import random
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

import torch

from kqueue.categories import Category
from kqueue.contract import Phase, Timing
from workers.judge.channel.gpu_memory import CudaCallError
from workers.judge.channel.orders import Call
from workers.judge.channel.tensors import TensorSpec
from workers.judge.ending import EvaluationEnded
from workers.judge.pipeline import clocks, estimator
from workers.judge.pipeline.blame import ABOUT_FORM
from workers.judge.pipeline.cases import Case
from workers.judge.pipeline.clocks import CpuClock, GpuClock, Hold, Instruments, TimedCall, empty_kernel_ns
from workers.judge.pipeline.estimator import Basis, Kind, Series, Stopping
from workers.judge.pipeline.exchange import Exchange
from workers.judge.pipeline.kept import KeptCalls
from workers.judge.pipeline.proxy import bytes_of
from workers.judge.pipeline.reference import Reference
from workers.judge.slot_config import SlotConfig

#: Version of this module's method, a part of the key under which baselines are cached.
METHOD: Final = "19"
#: Share of the time phase's deadline after which no further call begins.
_BUDGET: Final = 0.6
#: Kinds of calls that are not of the kind of those that count.
_CALLS: Final = {Kind.OVERHEAD: Call.OVERHEAD, Kind.IN_TURN: Call.IN_TURN}
#: Number of calls between two reads of the device's clocks.
_LOOK_EVERY: Final = 8
#: Least and greatest number of turns whose calls are made together. Below: the least number once a series can end, and
#: the share of the turns so far that applies if it is more.
_TOGETHER: Final = (4, 8)
_FEW_TOGETHER: Final = (3, 1 / 5)
#: Maximum size in bytes of the outputs of a call, and time in seconds of a call, for calls that are made together.
_TOGETHER_BYTES: Final = 4 << 20
_TOGETHER_S: Final = 0.005
#: Number of calls whose outputs get memory ahead of time, in multiples of the calls before a series can end. Most
#: series go on, and keep the outputs of both processes.
_RESERVED: Final = 6
#: Share of a candidate's calls after which its inputs are compared.
_INSPECTED: Final = 0.5
#: Number of alternating measurements of copies with two layouts. Alternation exposes both to the same disturbances.
_COMPARISONS: Final = 4
#: Number of consecutive calls that a process fails to enqueue in time before its forward is assumed to wait for the
#: GPU, and number of such calls in total for the same conclusion.
MISSES: Final = 3
_MISSED: Final = 10
#: Least time in seconds of a phase, because an alarm needs a positive time.
_LEAST_S: Final = 0.001


def turns_together(reference: Reference) -> int:
    """Return the greatest number of turns whose calls are enqueued before the first of them ends."""
    # Buffers are reset before an order, and the inputs and outputs of all its calls are held at the same time.
    form, cache = reference.form, reference.cache
    is_small = cache.is_roomy and sum(map(bytes_of, form.output_specs)) <= _TOGETHER_BYTES
    turns = min(_TOGETHER[1], cache.most_prepared)
    return turns if is_small and not form.resets and not form.differentiates else 1


def reserve_outputs(timing: Timing, reference: Reference) -> None:
    """Have torch allocate memory for the outputs of a usual series, because the driver can take milliseconds."""
    specs = _RESERVED * estimator.most_before_look(timing) * reference.form.output_specs
    _ = [torch.empty(spec.shape, dtype=spec.dtype, device="cuda") for spec in specs]


def usual_inputs(timing: Timing, reference: Reference) -> int:
    """Return the number of input sets for a series of candidate and reference that ends by precision."""
    calls = estimator.most_before_look(timing)
    if turns_together(reference) > 1:
        return timing.warmup + calls
    shares = 2 + sum(estimator.OVERHEAD_SHARES)
    fewest = estimator.FEWEST_OVERHEADS + estimator.FEWEST_IN_TURN
    return 2 * timing.warmup + math.ceil(calls * shares) + 2 * fewest


@dataclass(frozen=True, slots=True)
class Beside:
    """The reference, when it is timed in turn with a candidate.

    Attributes:
        exchange: its process.
        blaming: returns a context in which failures are blamed on the problem.
    """

    exchange: Exchange
    blaming: Callable[[], contextlib.AbstractContextManager[None]]


@dataclass(slots=True)
class _Inputs:
    """Inputs of the calls, which candidate and reference share.

    Attributes:
        variants: hidden variants that are still to be called.
        kept: keeps the calls of a candidate.
        beside: the reference in turn.
        last: the inputs of the last call.
    """

    reference: Reference
    variants: list[Case]
    kept: KeptCalls | None
    beside: Beside | None
    last: Case | None = None

    def fresh(self) -> Case:
        """Return inputs that were never used."""
        self.last = self.reference.cache.fresh()
        self.reference.cache.leave([self.last])
        return self.last

    def variant(self) -> Case | None:
        """Return the inputs of the next variant, or None if it cannot be made."""
        case, cache = self.variants.pop(), self.reference.cache
        if case.slot is None and not cache.draw([case]):
            return None
        self.last = case
        cache.leave([case])
        return case

    def for_overhead(self, *, on_gpu: bool) -> Case:
        """Return inputs for an overhead call: fresh ones, which no cache holds. Large ones are the last call's."""
        is_large = on_gpu and not self.reference.cache.is_roomy
        return self.last if is_large and self.last is not None and self.last.inputs else self.fresh()


@dataclass(slots=True, eq=False)
class _Planned(TimedCall):
    """A call of a series, and whether its outputs are held after it."""

    made_for: Kind = Kind.SAMPLE
    is_held: bool = False


class _Caller:
    """The timed calls of one process by one clock.

    Attributes:
        series: their times.
        blocks: True if its forward waits for the GPU, so that the GPU's clock cannot time it.
    """

    def __init__(self, exchange: Exchange, series: Series, kind: Call, stopping: Stopping, inputs: _Inputs) -> None:
        """Make no call yet. ``kind`` is the kind of the calls that count."""
        self.series = series
        self.blocks = False
        self.exchange = exchange
        self._inputs = inputs
        self._kind = kind
        self._stopping = stopping
        self._kept, self._beside = (inputs.kept, None) if series is stopping.series[0] else (None, inputs.beside)
        self._random = random.SystemRandom()
        self._misses = self._missed = 0
        self._left_s = inputs.reference.settings.deadlines.time_s
        #: Number of the last call that was kept before the last look at the device's clocks.
        self._mark = self._kept.counted if self._kept is not None else 0
        #: Memory to which the outputs of calls are copied, and that no call uses now.
        self._room = [self._make_room()]

    def turn(self, shared: Case | None) -> Iterator[_Planned]:
        """Yield the calls of a turn. Each has inputs once it is yielded.

        Args:
            shared: the inputs of the turn, for all processes. None takes new ones for each call.
        """
        variants = len(self._inputs.variants) if self._kept is not None else 0
        share = estimator.OVERHEAD_SHARES[self._kept is None]
        return self._planned(self._stopping.kinds(self.series, share, variants), shared)

    def missing(self) -> Iterator[_Planned]:
        """Yield the calls that a finished series still lacks."""
        while self._kept is not None and self._inputs.variants and not self.blocks:
            yield from self._planned([Kind.VARIANT], None)
        while self.series.lacks_in_turn and not self.blocks:
            yield from self._planned([Kind.IN_TURN], None)

    def _planned(self, kinds: Sequence[Kind], shared: Case | None) -> Iterator[_Planned]:
        on_gpu = self.series.basis == "gpu_clock"
        for kind in kinds:
            if kind is Kind.VARIANT:
                case = self._inputs.variant()
            elif kind is Kind.OVERHEAD:
                case = shared or self._inputs.for_overhead(on_gpu=on_gpu)
            else:
                case = shared or self._inputs.fresh()
            if case is not None:
                into = self._room.pop() if self._room else self._make_room()
                inspects = self._kept is not None and kind is not Kind.OVERHEAD and self._random.random() < _INSPECTED
                yield _Planned(self.exchange, _CALLS.get(kind, self._kind), case, into, inspects, made_for=kind)

    def look(self, *, throttled: bool) -> None:
        """Discard the calls since the last look if the device was throttled."""
        self.series.look(throttled=throttled)
        if self._kept is not None:
            if throttled:
                self._kept.discount(self._mark)
            self._mark = self._kept.counted

    def begin(self) -> None:
        """Begin or resume the process's time phase."""
        process = self.exchange.process
        if process.phase is not Phase.TIME:
            process.enter(Phase.TIME, max(self._left_s, _LEAST_S))

    def spend(self, seconds: float, *, missed: bool) -> None:
        """Record the duration of the process's calls, and whether it did not enqueue one of them in time."""
        # A longer time would have ended the process, so the host was paused.
        if seconds < self._left_s:
            self._left_s -= seconds
        self._missed += missed
        self._misses = self._misses + 1 if missed else 0
        self.blocks |= self._misses >= MISSES or self._missed >= _MISSED

    def note(self, call: _Planned, seconds: float, beside: _Planned | None) -> None:
        """Record the times of a call that took ``seconds``, and reuse its memory if it is not kept.

        Args:
            beside: the reference's call on the same inputs, or None.
        """
        counts = self._stopping.add(self.series, call.made_for, call.sample, seconds)
        is_variant = call.made_for is Kind.VARIANT
        if call.sample is None:
            if is_variant:
                self._inputs.variants.append(call.case)
        elif self._kept is not None and (counts or is_variant or call.made_for is Kind.IN_TURN):
            beside = None if is_variant else beside
            ns = call.sample.ns if counts else None
            call.is_held = self._kept.offer(call.case, ns, call.into, beside and beside.into)
            if beside is not None:
                beside.is_held |= call.is_held
        if counts:
            self.series.layouts.add(tuple(tuple(view.stride()) for view in call.views))
        if not call.is_held:
            self._room.append(call.into)

    def confirm(self, call: _Planned, error: Exception) -> NoReturn:
        """Raise a call's error. Blame the problem if the call is the reference's, or if its answers differ in form."""
        if self._beside is not None:
            with self._beside.blaming():
                raise error
        # The form of the reference's answer to this case is not known yet.
        if self._kept is not None and isinstance(error, EvaluationEnded) and error.outcome.category in ABOUT_FORM:
            self.exchange.process.stop_clock()
            self._inputs.reference.confirm_form(call.case)
        raise error

    def _make_room(self) -> list[torch.Tensor]:
        """Return memory for the outputs of calls, allocated and mapped in advance."""
        room = self.exchange.blanks()
        if self._inputs.reference.device == "cpu":
            for tensor in room:
                tensor.reshape(-1).view(torch.uint8).zero_()  # This makes Linux map the pages now.
        return room


class Stopwatch:
    """Times the calls of one process, and of the reference in turn with it."""

    def __init__(
        self,
        exchange: Exchange,
        reference: Reference,
        slot: SlotConfig,
        instruments: Instruments,
        kept: KeptCalls | None = None,
    ) -> None:
        """Prepare to time a process, and begin its time phase. ``kept`` keeps calls of a candidate."""
        self._seconds = reference.settings.deadlines.time_s
        exchange.process.enter(Phase.TIME, self._seconds)
        self._exchange = exchange
        self._reference = reference
        self._slot = slot
        self._instruments = instruments
        self._kept = kept
        self._random = random.SystemRandom()
        self._series: Series | None = None
        self._flusher: clocks.Flusher | None = None

    @property
    def _hold(self) -> Hold:
        assert self._instruments.hold is not None, "the slot has a GPU"
        return self._instruments.hold

    def blocks(self) -> bool:
        """Return whether the process's forward waits for the GPU."""
        case = self._reference.cache.fresh()
        self._exchange.process.enter(Phase.TIME, self._seconds)
        return GpuClock(self._hold, None).blocks(self._exchange, case)

    def measure(
        self, timing: Timing, *, basis: Basis, beside: Beside | None = None, variants: Sequence[Case] = ()
    ) -> tuple[Series, Series | None]:
        """Time calls until their median is known well enough.

        Args:
            basis: the clock. A process whose forward waits for the GPU is timed by ``cpu_clock``.
            beside: the reference, if it is to be timed in turn with the process.
            variants: hidden variants to call once each, at random positions.

        Returns:
            The process's series, and the reference's. The second is None if it was not timed or waits for the GPU.

        Raises:
            EvaluationEnded: a call failed, its outputs had another form than the reference's, or the device was
                throttled throughout (``timing_unstable``).
        """
        self._flusher = self._instruments.flusher if timing.cold_l2 else None
        inputs = _Inputs(self._reference, list(variants), self._kept, beside)
        on_cpu = CpuClock(self._flusher, on_gpu=self._slot.on_gpu)
        clock = on_cpu if basis == "cpu_clock" else GpuClock(self._hold, self._flusher)
        kinds = dict.fromkeys([self._exchange] if beside is None else [self._exchange, beside.exchange], Call.PLAIN)
        with _no_collections():
            enough_at = time.monotonic() + self._seconds * _BUDGET
            while True:
                callers = self._take(clock, kinds, inputs, timing, enough_at)
                if callers[0].blocks:
                    clock, kinds = on_cpu, dict.fromkeys(kinds, Call.PLAIN)
                    continue
                kinds = {caller.exchange: kinds[caller.exchange] for caller in callers}
                unswitched = {caller.exchange: Call.IN_TURN for caller in callers if caller.series.takes_no_turn}
                if not unswitched:
                    break
                kinds |= unswitched
        every = [caller.series for caller in callers]
        for one, kind in zip(every, kinds.values(), strict=True):
            self._complete(one, kind)
        self._series = every[0]
        return every[0], every[1] if len(every) > 1 else None

    def _complete(self, one: Series, kind: Call) -> None:
        """Add to a series the facts that do not come from its calls."""
        one.clocks = self._instruments.watch.clocks()
        if len(one.calls) < estimator.FEWEST:
            raise EvaluationEnded(
                Category.TIMING_UNSTABLE,
                f"the device was throttled in {one.discarded} of {one.discarded + len(one.calls)} calls",
                Phase.TIME,
                clocks=one.clocks,
            )
        if one.basis == "gpu_clock" and kind is Call.PLAIN:
            one.empty_ns = empty_kernel_ns()

    def _take(
        self,
        clock: GpuClock | CpuClock,
        kinds: Mapping[Exchange, Call],
        inputs: _Inputs,
        timing: Timing,
        enough_at: float,
    ) -> list[_Caller]:
        """Time a series of each process by one clock, unless the first one's forward waits for the GPU.

        The reference's series is left out if the reference alone waits for the GPU.
        """
        if self._kept is not None:
            self._kept.discount(0)
        on_gpu, begun = clock.basis == "gpu_clock", time.monotonic()
        series = {
            each: Series(clock.basis, timing.warmup, on_gpu and kind is Call.PLAIN) for each, kind in kinds.items()
        }
        stopping = Stopping(timing, list(series.values()), self._random)
        callers = [_Caller(exchange, one, kinds[exchange], stopping, inputs) for exchange, one in series.items()]
        own, turns, look_at, enough = callers[0], 0, _LOOK_EVERY, timing.warmup + stopping.first_look
        seconds = self._reference.forward_s
        while True:
            count = self._turns(clock, seconds, turns, enough, timing.calls - len(own.series.calls))
            if count == 1:  # Each call has other inputs, which are drawn when it is made.
                blocks = ([call] for each in self._random.sample(callers, len(callers)) for call in each.turn(None))
            else:
                blocks = self._together(callers, inputs, count)
            seconds = self._make(clock, callers, blocks)
            if own.blocks:
                return callers
            if callers[-1].blocks:
                del callers[1:]
                del stopping.series[1:]
            turns += count
            now = time.monotonic()
            late = now > enough_at
            done = stopping.is_finished(now - begun, late=late)
            if done or turns >= look_at:
                look_at = turns + _LOOK_EVERY
                throttled = self._instruments.watch.throttled()
                for caller in callers:
                    caller.look(throttled=throttled)
                if throttled:
                    done = late or own.series.discarded >= timing.calls
            if done:
                for caller in callers:
                    self._make(clock, callers, ([call] for call in caller.missing()))
                if self._kept is not None:
                    own.series.kept = self._kept.times
                return callers

    def _turns(self, clock: GpuClock | CpuClock, seconds: float, turns: int, enough: int, left: int) -> int:
        """Return the number of turns whose calls are made together.

        Args:
            seconds: approximate time of a call.
            turns: number of turns so far.
            enough: number of turns after which precision can end the series.
            left: number of calls that the settings still allow.
        """
        most = turns_together(self._reference) if clock.basis == "gpu_clock" and seconds < _TOGETHER_S else 1
        least, share = _FEW_TOGETHER
        further = min(_TOGETHER[1], max(least, int(share * turns)))
        wanted = min(self._random.randint(*_TOGETHER), enough - turns) if turns < enough else further
        return max(1, min(most, wanted, left))

    def _together(self, callers: Sequence[_Caller], inputs: _Inputs, count: int) -> Iterator[list[_Planned]]:
        """Yield the calls of ``count`` turns at once. Candidate and reference get the same inputs in a turn."""
        self._reference.cache.stock(count)
        block: list[_Planned] = []
        for _ in range(count):
            case = inputs.fresh()
            for caller in self._random.sample(callers, len(callers)):
                block += caller.turn(case)
        if block:
            yield block

    def _make(self, clock: GpuClock | CpuClock, callers: Sequence[_Caller], blocks: Iterable[list[_Planned]]) -> float:
        """Make blocks of calls. Return the mean seconds of a call."""
        owners, begun, made = {caller.exchange: caller for caller in callers}, time.monotonic(), 0
        for block in blocks:
            at = time.monotonic()
            for caller in callers:
                caller.begin()
            try:
                clock.time(block)
            except (EvaluationEnded, torch.OutOfMemoryError, CudaCallError) as error:
                failed = next(call for call in block if call.has_failed)
                owners[failed.exchange].confirm(failed, error)
            spent = (time.monotonic() - at) / len(block)
            for exchange, caller in owners.items():
                if own := [call for call in block if call.exchange is exchange]:
                    caller.spend(spent * len(own), missed=any(call.sample is None for call in own))
            beside = {
                call.case: call
                for call in block
                if call.exchange is not self._exchange and call.made_for is Kind.SAMPLE and call.sample is not None
            }
            # The reference's calls come last, because its outputs are held with the candidate's.
            for call in sorted(block, key=lambda call: call.exchange is not self._exchange):
                owners[call.exchange].note(call, spent, beside.get(call.case))
            made += len(block)
        return (time.monotonic() - begun) / max(made, 1)

    @property
    def has_other_layouts(self) -> bool:
        """True if the outputs had other strides than the reference's, so that copies could have been faster."""
        return self._slot.on_gpu and any(self._other_layouts())

    def compare_layouts(self) -> None:
        """Measure the time that the judge's copies saved compared with copies of the reference's outputs.

        This needs the exclusive device and a candidate that has ended: a kernel would gain if copies of dense outputs
        looked slower than they are.
        """
        spared = 0.0
        for spec, strides, dense in self._other_layouts():
            both = [
                [clocks.copy_ns(spec, steps, self._flusher) for steps in (strides, dense)] for _ in range(_COMPARISONS)
            ]
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


def _steps(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
    """Return the strides that determine the layout: only dimensions longer than one."""
    return [step for size, step in zip(shape, stride, strict=False) if size > 1]


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
