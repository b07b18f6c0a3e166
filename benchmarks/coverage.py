"""Simulate series of timed calls, and count the intervals that contain the truth: `python benchmarks/coverage.py`.

The clocks are simulated, and the estimator is the judge's (`workers/judge/pipeline/estimator.py`). For each purpose and
pair of kernel and reference it prints the share of the speedups' 95 % intervals that contain the true speedup, half
their median width, half the width that 95 % of them would need, and the mean number of calls. The last row of each
purpose claims 2.4 us less by its own clock than it takes. The exit status is 0 only if all shares are 93 to 97 %,
give or take the simulation's own error.

Times and quartiles are those that `benchmarks/repeat.py` and the integrity corpus recorded on H100s and H200s
(`docs/timing.md`, `tests/integrity/results/gpu.json`). Two processes that run the same code differ by the errors that
the estimator states.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from dataclasses import dataclass
from typing import Final

from kqueue.categories import Category
from kqueue.contract import Outcome, Purpose, Timing
from workers.judge.pipeline import estimator
from workers.judge.pipeline.estimator import Kind, Sample, Series, Stopping

#: Nanoseconds of a round trip without a forward, its empty kernel, events around a forward, and another's time slice.
_SWITCH, _EMPTY, _EVENTS, _SLICE = 336e3, 2e3, 3e3, 150e3
#: Greatest distance of the quartiles of overhead calls in microseconds, by the judge's clock and by their own.
_QUIET: Final = (3.9, 0.19)
#: Distance of the quartiles of a normal distribution in standard deviations.
_QUARTILES: Final = 1.349


@dataclass(frozen=True, slots=True)
class Pair:
    """A kernel and its reference. All times are in microseconds.

    Attributes:
        kernel, reference: their true times.
        outside, own: distance of the quartiles of their calls by the judge's clock and by their own.
        slowed: share of the calls that a time slice of another context lengthens, and of these that a further one does.
        drift: standard deviation of the device's speed as a share. It changes slowly.
        claims: time that the kernel subtracts from its own clock.
    """

    kernel: float
    reference: float
    outside: float = 2.1
    own: float = 0.19
    slowed: float = 0.0
    drift: float = 0.0
    claims: float = 0.0


PAIRS: Final = {
    "Triton softmax": Pair(4.3, 9.1),
    "Triton matmul": Pair(6.7, 10.5),
    "two lines, itself": Pair(5.9, 5.9),
    "two lines, itself, busy": Pair(5.9, 5.9, slowed=0.45),
    "20 us, rough": Pair(20, 25, own=0.8),
    "matmul of 1024, itself": Pair(64, 64, own=0.65),
    "ReLU of 64 MiB, itself": Pair(98, 98, own=0.9),
    "ReLU of 64 MiB, drifting": Pair(98, 98, own=0.9, drift=0.003),
    "0.3 ms": Pair(300, 340, own=1.4),
    "1 ms": Pair(1000, 1200, outside=3.9),
    "1 ms, rough": Pair(1000, 1200, outside=22),
    "4 ms, itself": Pair(4000, 4000, outside=10),
    "4 ms, rough": Pair(4000, 4000, outside=125),
    "false claim": Pair(4.4, 9.1, claims=2.4),
}


def simulate(pair: Pair, purpose: Purpose, chance: random.Random) -> Outcome:
    """Return the outcome of a kernel that is timed in turn with its reference."""
    timing, errors = Timing(purpose=purpose), estimator._ERRORS["gpu_clock"]  # pyright: ignore[reportPrivateUsage]
    series = [Series("gpu_clock", warming=timing.warmup, empty_ns=_EMPTY) for _ in range(2)]
    truths = [1e3 * pair.kernel, 1e3 * pair.reference]
    shifts = [
        [chance.gauss(0, math.hypot(fixed, share * ns) / 1.96) for fixed, share in (errors.outside, errors.own)]
        for ns in truths
    ]
    stopping, speed, turns = Stopping(timing, series, chance), chance.gauss(0, 1), 0
    while turns < stopping.first_look + timing.warmup or not stopping.is_finished(0.0, late=False):
        # After the first look, orders have three turns.
        for _ in range(1 if turns < stopping.first_look + timing.warmup else 3):
            turns += 1
            speed = 0.9 * speed + math.sqrt(1 - 0.9**2) * chance.gauss(0, 1)
            for number in chance.sample((0, 1), 2):
                for kind in stopping.kinds(series[number], estimator.OVERHEAD_SHARES[number]):
                    empty = kind is Kind.OVERHEAD
                    ns = _EMPTY if empty else truths[number] * (1 + pair.drift * speed)
                    outside, own = (0.0, 0.0) if empty else shifts[number]
                    spread = min(pair.outside, _QUIET[0]) if empty else pair.outside
                    outside += chance.gauss(0, 1e3 * spread / _QUARTILES)
                    while chance.random() < pair.slowed:
                        outside += _SLICE
                    own += chance.gauss(0, 1e3 * (min(pair.own, _QUIET[1]) if empty else pair.own) / _QUARTILES)
                    own += _EVENTS + ns - (0.0 if empty or number else 1e3 * pair.claims)
                    sample = Sample(round(_SWITCH + ns + outside), 50_000, round(own))
                    stopping.add(series[number], kind, sample, 0.0)
    kernel, reference = series
    theirs = estimator.overhead_of(reference, on_gpu=True)
    first = estimator.summarise(reference, theirs, timing, on_gpu=True)
    overhead = estimator.overhead_of(kernel, first, reference, on_gpu=True)
    runtime = estimator.summarise(kernel, overhead, timing, reference, on_gpu=True, fine=first.is_fine)
    first = estimator.summarise(reference, theirs, timing, on_gpu=True, fine=runtime.is_fine)
    return Outcome(category=Category.PASSED, runtime=runtime, baseline=first)


def figures(pair: Pair, purpose: Purpose, count: int, seed: int) -> dict[str, float]:
    """Return the figures of simulated outcomes with a speedup."""
    chance = random.Random(seed)
    outcomes = [one for _ in range(count) if (one := simulate(pair, purpose, chance)).speedup is not None]
    truth, errors, widths = pair.reference / pair.kernel, list[float](), list[float]()
    for one in outcomes:
        assert one.speedup is not None
        assert one.speedup_interval is not None
        errors.append(math.exp(abs(math.log(one.speedup / truth))) - 1)
        widths.append(one.speedup_interval[1] / one.speedup - 1)
    runtimes = [one.runtime for one in outcomes if one.runtime is not None]
    return {
        "covered": statistics.fmean(error <= width for error, width in zip(errors, widths, strict=True)),
        "width": statistics.median(widths),
        "needed": sorted(errors)[int(0.95 * len(errors))],
        "calls": statistics.fmean(one.count for one in runtimes),
        "own clock": statistics.fmean(one.is_fine for one in runtimes),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=int, default=2000, help="simulated outcomes of each pair (2000)")
    parser.add_argument("--seed", type=int, default=1)
    options, wrong = parser.parse_args(), 0
    for purpose in (Purpose.TRAIN, Purpose.RANK, Purpose.PUBLISH):
        for name, pair in PAIRS.items():
            found = figures(pair, purpose, options.series, options.seed)
            print(f"{purpose:<8}{name:<25}", *(f"{key} {value:.4g}" for key, value in found.items()), flush=True)
            error = 0.02 + 1.96 * math.sqrt(0.05 * 0.95 / options.series)
            wrong += not pair.claims and abs(found["covered"] - 0.95) > error
    print(f"{wrong} pairs are not covered in 93 to 97 %")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
