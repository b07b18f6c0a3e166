"""Timed calls of a candidate and of the reference, in turns.

Every call has new values. The outputs of each call are copied to memory that was allocated before the call. Some calls
are kept and verified later (:mod:`workers.judge.pipeline.kept`). Calls on hidden variants are made at random positions
by the same orders, and are all verified. A candidate that is right in some calls only, and lucky, gains nothing either:
no call counts as shorter than the shortest kept call (:func:`.series.summarise`).

Candidate and reference are called in turns, in random order, while this slot has the device for itself. So both meet
the same clocks, temperature and neighbours.

The launch overhead is subtracted from each time. It is the time of the same call with an empty kernel instead of a
forward. A candidate that slowed this measurement would look fast. Therefore the launch overhead is also measured in a
process that runs the reference. A candidate's own value counts only where it is smaller, which shows that the device
has become quieter since. The judge copies outputs with their strides. Where a candidate's strides make the copy faster
than the reference's, the reference's launch overhead is reduced by the difference.

The empty kernel needs a time slice of the GPU. A forward that launches no kernel needs none, and would look faster by
the cost of a context switch. Therefore some calls, chosen at random, are made after an empty kernel. If these take
longer by more than the kernel itself, all calls are made so.
"""

from __future__ import annotations

import contextlib
import gc
import math
import random
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NoReturn

import torch

from kqueue.categories import Category
from kqueue.contract import Phase, Timing
from workers.judge.channel.gpu_memory import CudaCallError
from workers.judge.channel.orders import Call
from workers.judge.channel.tensors import TensorSpec
from workers.judge.ending import EvaluationEnded
from workers.judge.pipeline import clocks, series
from workers.judge.pipeline.blame import ABOUT_FORM
from workers.judge.pipeline.cases import Case
from workers.judge.pipeline.clocks import CpuClock, GpuClock, Hold, Instruments, TimedCall, empty_kernel_ns
from workers.judge.pipeline.exchange import Exchange
from workers.judge.pipeline.kept import KeptCalls
from workers.judge.pipeline.proxy import bytes_of
from workers.judge.pipeline.reference import Reference
from workers.judge.pipeline.series import Basis, Series
from workers.judge.slot_config import SlotConfig

#: Version of this module's method, a part of the key under which baselines are cached.
METHOD: Final = "15"
#: Number of launch-overhead measurements as a share of the calls, of a candidate and of the reference.
OVERHEAD_SHARE: Final = 0.2
_REFERENCE_SHARE: Final = 0.3
#: The same share until there are enough. They are spread over the calls, because the first calls can be slower.
_FIRST_SHARE: Final = 0.5
#: Share of the time phase's deadline after which no further call begins.
_BUDGET: Final = 0.6
#: Time in seconds after which a series ends even if it is not precise, if it has enough calls, and for which the
#: reference is called in turn. By the CPU's clock, more calls next to other processes hardly narrow the interval.
_SERIES_S: Final[dict[Basis, float]] = {"gpu_clock": 1.0, "cpu_clock": 0.2}
#: Number of calls after an empty kernel as a share of the plain calls, and their minimum number.
_IN_TURN_SHARE: Final = 0.15
_FEWEST_IN_TURN: Final = 3
#: Number of calls over which the calls on variants are spread.
_SPREAD: Final = 12
#: Number of calls between two reads of the device's clocks.
_LOOK_EVERY: Final = 8
#: Least and greatest number of turns whose calls are made together, and their number once a series has enough calls.
_TOGETHER: Final = (4, 8)
_FEW_TOGETHER: Final = 3
#: Maximum size in bytes of the outputs of a call, and time in seconds of a call, for calls that are made together.
_TOGETHER_BYTES: Final = 4 << 20
_TOGETHER_S: Final = 0.005
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


def usual_inputs(timing: Timing, reference: Reference) -> int:
    """Return the number of input sets for a series of candidate and reference that ends by precision."""
    calls = min(timing.calls, sum(series.ENOUGH))
    if turns_together(reference) > 1:
        return timing.warmup + calls
    shares = 2 + OVERHEAD_SHARE + _REFERENCE_SHARE + 2 * _IN_TURN_SHARE
    return 2 * timing.warmup + math.ceil(calls * shares) + 2 * series.FEWEST_OVERHEADS


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
        last: the inputs of the last call.
    """

    reference: Reference
    variants: list[Case]
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


class _Purpose(Enum):
    """The reason for a timed call."""

    SAMPLE = auto()
    OVERHEAD = auto()
    IN_TURN = auto()
    VARIANT = auto()


@dataclass(slots=True, eq=False)
class _Planned(TimedCall):
    """A call of a series, and whether its outputs are held after it."""

    purpose: _Purpose = _Purpose.SAMPLE
    is_held: bool = False


class _Caller:
    """The timed calls of one process by one clock.

    Attributes:
        series: their times.
        blocks: True if its forward waits for the GPU, so that the GPU's clock cannot time it.
        needs_overheads: True to make an overhead call in each turn, because it is not settled which clock counts.
    """

    def __init__(
        self,
        exchange: Exchange,
        inputs: _Inputs,
        basis: Basis,
        kind: Call,
        timing: Timing,
        kept: KeptCalls | None,
        beside: Beside | None,
    ) -> None:
        """Make no call yet.

        Args:
            kind: the kind of the calls that count.
            kept: keeps the calls of a candidate.
            beside: set for a reference in turn.
        """
        self.series = Series(basis)
        self.blocks = self.needs_overheads = False
        self.exchange = exchange
        self._inputs = inputs
        self._kind = kind
        self._timing = timing
        self._kept = kept
        self._beside = beside
        self._share = OVERHEAD_SHARE if kept is not None else _REFERENCE_SHARE
        self._random = random.SystemRandom()
        self._warming = timing.warmup
        self._misses = self._missed = 0
        self._looks = kind is Call.PLAIN and basis == "gpu_clock"
        self._left_s = inputs.reference.settings.deadlines.time_s
        self._spent_s = 0.0
        #: Number of calls since the last look at the device's clocks, and of the last call that was kept before.
        self._since = 0
        self._mark = kept.counted if kept is not None else 0
        #: Memory to which the outputs of calls are copied, and that no call uses now.
        self._room = [self._make_room()]

    def turn(self, shared: Case | None) -> Iterator[_Planned]:
        """Yield one call to time, and at random some other calls. Each has inputs once it is yielded.

        Args:
            shared: the inputs of the turn, for all processes. None takes new ones for each call.
        """
        one, ready = self.series, self._warming == 0
        if self._is_spent() and len(one.calls) >= series.FEWEST and len(one.overheads) >= series.FEWEST_OVERHEADS:
            return
        share, missing = self._share, series.FEWEST_OVERHEADS - len(self.series.overheads)
        if missing > 0:
            share = max(_FIRST_SHARE, missing / max(1, self._timing.calls - len(self.series.calls)))
        wants = self._random.random() < share and not self.series.knows_overhead(self._timing.precision)
        # The first call of an order differs, so neither kind of call is always first.
        comes_late = self._random.random() < 0.5
        if (wants or self.needs_overheads) and not comes_late:
            yield self._overhead(shared)
        if self._looks and ready and self._random.random() < _IN_TURN_SHARE:
            yield self._plan(_Purpose.IN_TURN, Call.IN_TURN, shared or self._inputs.fresh())
        if self._kept is not None and ready:
            due = len(self._inputs.variants) / max(1, _SPREAD - len(self.series.calls))
            if self._random.random() < due:
                yield from self._variant()
        yield self._plan(_Purpose.SAMPLE, self._kind, shared or self._inputs.fresh())
        if (wants or self.needs_overheads) and comes_late:
            yield self._overhead(shared)

    def _overhead(self, shared: Case | None) -> _Planned:
        case = shared or self._inputs.for_overhead(on_gpu=self.series.basis == "gpu_clock")
        return self._plan(_Purpose.OVERHEAD, Call.OVERHEAD, case)

    def _variant(self) -> Iterator[_Planned]:
        if (case := self._inputs.variant()) is not None:
            yield self._plan(_Purpose.VARIANT, self._kind, case)

    def _plan(self, purpose: _Purpose, kind: Call, case: Case) -> _Planned:
        into = self._room.pop() if self._room else self._make_room()
        is_inspected = (
            self._kept is not None and purpose is not _Purpose.OVERHEAD and self._random.random() < _INSPECTED
        )
        return _Planned(self.exchange, kind, case, into, is_inspected, purpose=purpose)

    def is_done(self, more: float, *, long: bool, late: bool) -> bool:
        """Return whether no further call is needed.

        Args:
            more: a random number below 1, the same for all processes.
            long: True if the series has taken so long that it ends with enough calls.
            late: True if it has taken so long that it ends with the fewest calls.
        """
        one, calls = self.series, len(self.series.calls)
        if len(one.overheads) < series.FEWEST_OVERHEADS:
            return False
        if calls >= self._timing.calls:
            return True
        if calls < series.FEWEST:
            return False
        if late or self._is_spent():
            return True
        wanted = self._timing.precision
        if wanted <= 0 or calls < series.enough(more):
            return False
        return long or one.is_precise(wanted)

    def _is_spent(self) -> bool:
        """Return whether this is the reference in turn with a kernel, and has used its time."""
        return self._beside is not None and self._spent_s > _SERIES_S[self.series.basis]

    def look(self, *, throttled: bool) -> None:
        """Discard the calls since the last look if the device was throttled."""
        if throttled:
            self.series.discard(self._since)
            if self._kept is not None:
                self._kept.discount(self._mark)
        self._since = 0
        self._mark = self._kept.counted if self._kept is not None else 0

    def missing(self) -> Iterator[_Planned]:
        """Yield the calls that a finished series still lacks."""
        while self._kept is not None and self._inputs.variants and not self.blocks:
            yield from self._variant()
        for _ in range(_FEWEST_IN_TURN - len(self.series.in_turn)):
            if self._looks:
                yield self._plan(_Purpose.IN_TURN, Call.IN_TURN, self._inputs.fresh())

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
        self._spent_s += seconds
        self._missed += missed
        self._misses = self._misses + 1 if missed else 0
        self.blocks |= self._misses >= MISSES or self._missed >= _MISSED

    def note(self, call: _Planned, beside: _Planned | None) -> None:
        """Record the times of a call that was made. ``beside`` is the reference's call on the same inputs, or None."""
        sample = call.sample
        if sample is None:
            if call.purpose is _Purpose.VARIANT:
                self._inputs.variants.append(call.case)
        elif call.purpose is _Purpose.OVERHEAD:
            if self._warming == 0:
                self.series.overheads.append(sample.ns)
                self.series.yardsticks.append(sample.yardstick_ns)
                self.series.own_overheads.append(sample.own_ns)
        elif call.purpose is _Purpose.IN_TURN:
            self.series.in_turn.append(sample.ns)
            self._looks = sample.ns < series.LONG_NS
            self._keep(call, None, beside)
        elif call.purpose is _Purpose.VARIANT:
            self.series.variants.append(sample.ns)
            self._keep(call, None, None)
        elif self._warming:
            self._warming -= 1
        else:
            self.series.layouts.add(tuple(tuple(view.stride()) for view in call.views))
            self.series.calls.append(sample.ns)
            self.series.yardsticks.append(sample.yardstick_ns)
            self.series.own.append(sample.own_ns)
            self._since += 1
            self._keep(call, sample.ns, beside)
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

    def _keep(self, call: _Planned, ns: int | None, beside: _Planned | None) -> None:
        """Offer a candidate's call to be kept."""
        if self._kept is not None:
            call.is_held = self._kept.offer(call.case, ns, call.into, beside and beside.into)
            if beside is not None:
                beside.is_held |= call.is_held

    def _make_room(self) -> list[torch.Tensor]:
        """Return memory for the outputs of calls, allocated and mapped in advance."""
        room = self.exchange.blanks()
        if self._inputs.reference.device == "cpu":
            for tensor in room:
                tensor.reshape(-1).view(torch.uint8).zero_()  # This makes Linux map the pages now.
        return room


def _settle(callers: Sequence[_Caller]) -> bool:
    """Return whether it is settled for all series which clock counts. If not, request further overhead calls."""
    own, *beside = [caller.series for caller in callers]
    settled = all([series.is_settled(own, *beside), *map(series.is_settled, beside)])
    for caller in callers:
        caller.needs_overheads = not settled
    return settled


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
        inputs = _Inputs(self._reference, list(variants))
        kinds = [Call.PLAIN] * (1 if beside is None else 2)
        callers: list[_Caller] | None = None
        with _no_collections():
            enough_at = time.monotonic() + self._seconds * _BUDGET
            while basis == "gpu_clock" and callers is None:
                callers = self._take(GpuClock(self._hold, self._flusher), beside, kinds, inputs, timing, enough_at)
                if callers is None:
                    break
                beside = beside if len(callers) > 1 else None
                if any(caller.series.takes_no_turn for caller in callers):
                    kinds = [
                        Call.IN_TURN if caller.series.takes_no_turn else kind
                        for caller, kind in zip(callers, kinds, strict=False)
                    ]
                    callers = None
            if callers is None:
                clock = CpuClock(self._flusher, on_gpu=self._slot.on_gpu)
                callers = self._take(clock, beside, [Call.PLAIN, Call.PLAIN], inputs, timing, enough_at)
            assert callers is not None
        every = [caller.series for caller in callers]
        for one, kind in zip(every, kinds, strict=False):
            self._complete(one, kind)
        self._series = every[0]
        return every[0], every[1] if len(every) > 1 else None

    def _complete(self, one: Series, kind: Call) -> None:
        """Add to a series the facts that do not come from its calls."""
        one.clocks = self._instruments.watch.clocks()
        if len(one.calls) < series.FEWEST:
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
        beside: Beside | None,
        kinds: list[Call],
        inputs: _Inputs,
        timing: Timing,
        enough_at: float,
    ) -> list[_Caller] | None:
        """Time a series of each process by one clock. Return None if the first one's forward waits for the GPU.

        The reference's series is left out if the reference alone waits for the GPU.
        """
        if self._kept is not None:
            self._kept.discount(0)
        own = _Caller(self._exchange, inputs, clock.basis, kinds[0], timing, self._kept, None)
        callers = [own]
        if beside is not None:
            callers.append(_Caller(beside.exchange, inputs, clock.basis, kinds[1], timing, None, beside))
        more, turns, long_at = self._random.random(), 0, time.monotonic() + _SERIES_S[own.series.basis]
        look_at, enough = _LOOK_EVERY, timing.warmup + series.enough(more)
        seconds = self._reference.forward_s
        while True:
            count = self._turns(clock, seconds, enough - turns, timing.calls - len(own.series.calls))
            blocks = self._turn(callers) if count == 1 else self._together(callers, inputs, count)
            seconds = self._make(clock, callers, blocks)
            if own.blocks:
                return None
            callers = [caller for caller in callers if not caller.blocks]
            turns += count
            now = time.monotonic()
            late = now > enough_at
            done = all(caller.is_done(more, long=now > long_at, late=late) for caller in callers)
            if done and not late and len(own.series.calls) < timing.calls:
                done = _settle(callers)
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

    def _turns(self, clock: GpuClock | CpuClock, seconds: float, to_enough: int, left: int) -> int:
        """Return the number of turns whose calls are made together.

        Args:
            seconds: approximate time of a call.
            to_enough: number of turns after which precision can end the series.
            left: number of calls that the settings still allow.
        """
        most = turns_together(self._reference) if clock.basis == "gpu_clock" and seconds < _TOGETHER_S else 1
        wanted = min(self._random.randint(*_TOGETHER), to_enough) if to_enough > 0 else _FEW_TOGETHER
        return max(1, min(most, wanted, left))

    def _turn(self, callers: Sequence[_Caller]) -> Iterator[list[_Planned]]:
        """Yield the calls of one turn one by one. Each has other inputs, which are drawn when it is yielded."""
        for caller in self._random.sample(callers, len(callers)):
            yield from ([call] for call in caller.turn(None))

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
                if call.exchange is not self._exchange and call.purpose is _Purpose.SAMPLE and call.sample is not None
            }
            # The reference's calls come last, because its outputs are held with the candidate's.
            for call in sorted(block, key=lambda call: call.exchange is not self._exchange):
                owners[call.exchange].note(call, beside.get(call.case))
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
