"""The judge's clock.

A timed call: wait until the candidate is READY, write inputs, poison the outputs, flush the L2 cache, read the
clock, set the flag GO, wait for the flag DONE, copy the outputs, read the clock. The candidate answers DONE
after its device has finished. What the same round trip takes without a forward (the null) is subtracted.

A candidate that slowed its null would make itself look fast. So the null is also taken from a process that
runs the reference, with the baseline, and a candidate's own counts only where it is the smaller of the two:
it then tells of a device that has become quieter since.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from typing import Final

import torch

from kqueue.categories import Category
from kqueue.contract import Measurement, Phase, Timing
from workers.channel import flags
from workers.channel.protocol import Order
from workers.gpu import environment
from workers.judge import compare
from workers.judge.ending import EvaluationEnded
from workers.judge.problem import Case
from workers.judge.session import Session
from workers.slot import Slot

#: Part of the key under which baselines are cached: changes when this module's method does.
METHOD: Final = "cpu_clock/2"
#: The fewest calls that make a measurement; below that the time budget does not end it.
_FEWEST: Final = 5
#: The share of the time phase's deadline after which no further call is begun.
_BUDGET: Final = 0.6
#: Outputs of timed calls that are kept to be compared later, in bytes; further ones are compared at once.
_KEPT_BYTES: Final = 1 << 30


class Clock:
    """Times the calls of one candidate."""

    def __init__(self, session: Session, cases: list[Case], slot: Slot, seconds: float) -> None:
        """Make ready.

        Args:
            session: the candidate, in its time phase.
            cases: input sets with known answers; each call uses one of them.
            slot: where it runs.
            seconds: deadline of the time phase.
        """
        self._session = session
        self._process = session.process
        self._cases = cases
        self._slot = slot
        self._seconds = seconds
        self._kept: list[tuple[list[torch.Tensor], Case]] = []
        self._kept_bytes = 0

    def measure(self, timing: Timing, null_every: int) -> tuple[list[int], list[int]]:
        """Time up to ``timing.calls`` calls, and a null beside every ``null_every``-th, so that drift meets both.

        Returns:
            nanoseconds of the calls, the null not subtracted, and of the nulls. :meth:`verify` is still to be
            called.

        Raises:
            EvaluationEnded: a call failed, or its outputs did not have the reference's form.
        """
        flush = _Flusher(self._slot.on_gpu and timing.cold_l2)
        choose = random.SystemRandom()
        samples: list[int] = []
        nulls: list[int] = []
        begun = time.monotonic()
        collecting = gc.isenabled()
        gc.disable()
        self._process.start_clock()
        try:
            for number in range(-timing.warmup, timing.calls):
                if number % null_every == 0:
                    null = self._call(Order.TIME_NULL, choose.choice(self._cases), flush)
                    nulls += [null] if number >= 0 else []
                sample = self._call(Order.TIME, choose.choice(self._cases), flush)
                samples += [sample] if number >= 0 else []
                if len(samples) >= _FEWEST and time.monotonic() - begun > self._seconds * _BUDGET:
                    break
        finally:
            if collecting:
                gc.enable()
        self._process.stop_clock()
        return samples, nulls

    def verify(self) -> None:
        """Compare what the timed calls returned; the device need not be had alone for it.

        Raises:
            EvaluationEnded: ``nondeterministic``: a call was wrong on an input that was answered right before.
        """
        for outputs, case in self._kept:
            self._check(outputs, case)
        self._kept.clear()

    def _call(self, order: Order, case: Case, flush: _Flusher) -> int:
        page, process = self._process.flags, self._process
        number = process.send(order, seed=case.seed)
        self._wait(flags.READY, number)
        self._session.load(case)
        flush()
        self._session.settle()
        start = time.perf_counter_ns()
        page[flags.GO] = number
        self._wait(flags.DONE, number)
        # The copy waits for whatever was still on its way: DONE said too early gains nothing.
        outputs = self._session.snapshot()
        end = time.perf_counter_ns()
        self._session.check_form(process.receive(number), case)
        if page[flags.DONE] != number:
            raise EvaluationEnded(
                Category.SANDBOX_VIOLATION, "the candidate answered a timed call that it had not done", Phase.TIME
            )
        if order is Order.TIME:
            self._keep(outputs, case)
        return end - start

    def _wait(self, flag: int, number: int) -> None:
        """Until the flag shows the call's number, or the candidate has something else to say."""
        process = self._process
        flags.wait(process.flags, flag, number, nap=not self._slot.on_gpu, gone=process.answered)

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


def null_of(samples: list[int], slot: Slot) -> float:
    """The null of these samples, in nanoseconds: their median; on a CPU, whose cores others use, the least.

    What others take there is added to calls, never taken from them: a null that held it would make times
    too short, even negative.
    """
    return statistics.median(samples) if slot.on_gpu else float(min(samples))


def summarise(samples: list[int], null_ns: float, timing: Timing, slot: Slot) -> Measurement:
    """Samples in nanoseconds as a measurement in milliseconds, the null subtracted."""
    times = [(sample - null_ns) / 1e6 for sample in samples]
    q1, median, q3 = statistics.quantiles(times, n=4, method="inclusive")
    return Measurement(
        basis="cpu_clock",
        count=len(times),
        median_ms=median,
        q1_ms=q1,
        q3_ms=q3,
        mean_ms=statistics.fmean(times),
        std_ms=statistics.stdev(times),
        min_ms=min(times),
        max_ms=max(times),
        null_ms=null_ns / 1e6,
        cold_l2=timing.cold_l2 and slot.on_gpu,
        clocks=environment.clocks(slot),
    )


class _Flusher:
    """Empties the GPU's L2 cache by writing twice its size."""

    def __init__(self, wanted: bool) -> None:
        self._buffer: torch.Tensor | None = None
        if wanted:
            size = torch.cuda.get_device_properties(0).L2_cache_size
            self._buffer = torch.empty(2 * size, dtype=torch.uint8, device="cuda")

    def __call__(self) -> None:
        if self._buffer is not None:
            self._buffer.zero_()
