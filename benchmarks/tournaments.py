"""Replay tournaments on simulated samples: `python benchmarks/tournaments.py [--tournaments N] [--out FILE]`.

No kernel runs. Each tournament draws 500 kernels. A third is wrong, and the speeds of the correct ones are lognormal.
The costs of checks and timed calls are the recorded stages of `results/speed.json`. The noise of one evaluation has a
part that differs from process to process, and a part that falls with the number of timed calls.

The exhaustive way judges each correct kernel five times in full, like the last comparison of `kqueue tune`. The
budget of a tournament is a fifth of its device time. The result has the share of tournaments whose winner is within 1 %
of the truly fastest kernel, and the device time as a part of the exhaustive way, by the noise between processes. The
exit status is 0 only if at least 19 of 20 tournaments are within 1 % in each case.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from kqueue.features.search.plan import Entry, Result
from kqueue.features.tournament.tournament import Tournament

HERE = Path(__file__).parent
CALLS, CHECKS, REPEATS = 100, 5, 5
#: Standard deviation of one timed call.
CALL_NOISE = 0.05


@dataclass
class Samples:
    """Simulated kernels. ``speeds`` has None for a wrong one."""

    speeds: list[float | None]
    noise: float
    chance: random.Random
    stages: dict[str, float]

    @classmethod
    def draw(cls, kernels: int, noise: float, seed: int) -> Samples:
        """Return kernels with speeds that the seed determines."""
        chance = random.Random(seed)
        speeds = [None if chance.random() < 1 / 3 else chance.lognormvariate(0, 0.3) for _ in range(kernels)]
        recorded = json.loads((HERE / "results" / "speed.json").read_text())
        return cls(speeds, noise, chance, recorded["slots"]["6"]["stages_s"])

    def cost(self, calls: int, checks: int, *, right: bool) -> float:
        """Return the exclusive device seconds of an evaluation. A wrong kernel fails at its first check."""
        stages = self.stages
        fixed = stages["alone_measure"] - stages["check"] - stages["time"]
        check = stages["check"] / CHECKS
        return fixed + check * checks + stages["time"] * calls / CALLS if right else fixed + check

    def judge(self, entry: Entry) -> Result:
        """Return the result of an entry."""
        speed = self.speeds[int(entry.config[0])]
        cost = self.cost(entry.calls, CHECKS if entry.repeat < 0 else 1, right=speed is not None)
        noise = math.hypot(self.noise, CALL_NOISE / math.sqrt(entry.calls))
        score = 0.0 if speed is None else speed * math.exp(self.chance.gauss(0, noise))
        return Result(entry, speed is not None, score, cost)

    def exhaustive_s(self) -> float:
        """Return the device seconds of judging all kernels in full."""
        return sum(
            REPEATS * self.cost(CALLS, CHECKS, right=True) if speed else self.cost(CALLS, CHECKS, right=False)
            for speed in self.speeds
        )


def replay(kernels: int, noise: float, seed: int) -> tuple[float, float]:
    """Run a tournament. Return the winner's speed as a part of the fastest one's, and the part of the device time."""
    samples = Samples.draw(kernels, noise, seed)
    plan = Tournament(kernels, CALLS, samples.exhaustive_s() / 5)
    results: list[Result] = []
    while (batch := plan.next(results)) is not None:
        results += map(samples.judge, batch)
    winner = samples.speeds[plan.places(results)[0].kernel] or 0.0
    part = sum(one.device_s for one in results) / samples.exhaustive_s()
    return winner / max(speed for speed in samples.speeds if speed), part


def main() -> int:
    """Replay tournaments and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tournaments", type=int, default=100)
    parser.add_argument("--kernels", type=int, default=500)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "tournaments.json")
    arguments = parser.parse_args()
    figures = {}
    for noise in (0.003, 0.01, 0.02):
        found = [replay(arguments.kernels, noise, seed) for seed in range(arguments.tournaments)]
        figures[f"noise {noise:.1%}"] = {
            "tournaments": len(found),
            "within_1_percent": sum(speed >= 0.99 for speed, _ in found) / len(found),
            "worst": round(min(speed for speed, _ in found), 4),
            "device_time": {"median": round(median(part for _, part in found), 3)}
            | {"largest": round(max(part for _, part in found), 3)},
        }
    arguments.out.write_text(json.dumps({"kernels": arguments.kernels, "figures": figures}, indent=1) + "\n")
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")
    return 0 if all(one["within_1_percent"] >= 0.95 for one in figures.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
