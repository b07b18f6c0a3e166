"""Stage ``measure``: the candidate's calls are checked and timed.

Timing and the checks of small inputs hold the device exclusively. The checks of large inputs overlap with the same work
of other slots, but with no timing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kqueue.contract import Phase
from workers.judge.pipeline import speed_of_light, timing
from workers.judge.pipeline.context import Context, Grant
from workers.judge.pipeline.evidence import Fields
from workers.judge.pipeline.exchange import Candidate
from workers.judge.pipeline.reference import Reference
from workers.judge.pipeline.stages.check import Checks
from workers.judge.pipeline.stages.load import Loaded
from workers.judge.pipeline.stages.refer import Referenced

#: Number of timed calls that are verified: as many as the reference answers in this time in seconds, within bounds.
_MOST_PROOFS: Final = 16
_SLOW_PROOFS: Final = 8
_FEWEST_PROOFS: Final = 2
_PROOFS_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Times:
    """Timed calls of a candidate.

    Attributes:
        stopwatch: the stopwatch, which can still verify calls.
        series: the times.
        bound: figures of the speed-of-light bound, empty on a CPU.
    """

    stopwatch: timing.Stopwatch
    series: timing.Series
    bound: Fields


@dataclass(frozen=True, slots=True)
class Measured:
    """A candidate that was right in all checked calls.

    Attributes:
        checks: number of input sets on which it was right.
        times: its times, or None if it is not to be timed.
    """

    candidate: Candidate
    checks: int
    times: Times | None


def measure(context: Context, referenced: Referenced, loaded: Loaded) -> Measured:
    """Check and time the candidate."""
    steps, candidate = context.steps, loaded.candidate
    with steps.timed("wait_for_strangers"):
        context.device.before_timing()
    checks, times, checked = Checks(context, referenced, candidate), None, 0
    shares, timed = shares_checks(context, referenced.reference), referenced.baseline is not None
    if shares:
        with steps.untimed("check"), steps.backstop(Phase.CHECK):
            checked = checks.run()
    if timed or not shares:
        with steps.alone("measure"), steps.backstop(Phase.CHECK):
            if not shares:
                checked = checks.run()
            if timed:
                times = _time(context, referenced, candidate)
                if not shares:
                    checks.run_again()
    with context.untimed_if_large(referenced.reference, "check"), steps.backstop(Phase.CHECK):
        if timed and shares:
            checks.run_again()
        checks.profile()
    return Measured(candidate, checked, times)


def shares_checks(context: Context, reference: Reference) -> bool:
    """Return whether checked calls share the device with other slots' untimed work."""
    # Large inputs keep the device busy, and the CPU idle, for as long as the timing does. For small inputs, the calls
    # take less time than a second wait for the device.
    has_siblings = context.slot.on_gpu and context.slot.siblings > 1
    return has_siblings and reference.cache.is_large and Grant.EXCLUSIVE not in context.granted


def _time(context: Context, referenced: Referenced, candidate: Candidate) -> Times:
    """Time the candidate by the clock of the baseline."""
    reference, instruments, baseline = referenced.reference, referenced.instruments, referenced.baseline
    assert baseline is not None
    context.budget.record()
    stopwatch = timing.Stopwatch(candidate, reference, context.slot, instruments, _proofs(context, reference))
    with context.steps.timed("time"):
        series = stopwatch.measure(context.settings.timing, basis=baseline.basis, overhead_share=timing.OVERHEAD_SHARE)
    context.budget.record()
    bound: Fields = {}
    if instruments.flusher is not None:
        bandwidth = instruments.flusher.bandwidth()
        bound = speed_of_light.floor(reference.cache.input_bytes, reference.written_bytes, bandwidth)
    context.evidence.floor = bound
    return Times(stopwatch, series, bound)


def _proofs(context: Context, reference: Reference) -> int:
    """Return the number of timed calls to verify, limited by the reference's speed."""
    by_time = max(int(_PROOFS_S / reference.forward_s), _SLOW_PROOFS)
    by_deadline = int(reference.proxy.left_s / 2 / reference.forward_s)
    most = _MOST_PROOFS if context.slot.on_gpu else _SLOW_PROOFS
    return max(_FEWEST_PROOFS, min(most, by_time, by_deadline))
