"""Judge the same pairs again and again: `python benchmarks/repeat.py --out DIR [--slots N] [--rounds N]`.

It starts a fleet and submits `--rounds` evaluations of each pair in one batch, in random order and without reuse of
verdicts, so that all slots are busy. For each pair it prints the 5th, 50th and 95th percentile of speedup and runtime,
the share of the speedups' 95 % intervals that contain the median speedup of all rounds, and their median width. For a
reference against itself the true speedup is 1, and the share counts the intervals that contain 1.

The last pairs are a `forward` that waits for the GPU and a two-line kernel. Figures go to `DIR/repeat.json`. The exit
status is 0 only if every kernel passed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from speed import PATIENCE_S, about, fleet
from speed import gallery as gallery_entries

from kqueue import Request, Verdict

#: Names of the gallery's right kernels.
KERNELS = ("softmax", "matmul", "layer_norm", "gelu")
#: Problem of which the model itself is the kernel, by the name of the pair.
ITSELF = {
    "itself: relu": ("torch.relu(x) + 1", "4096, 4096"),
    "itself: matmul": ("x @ x.T", "1024, 1024"),
    "itself: waits": ("x * x.sum().item()", "1024, 1024"),
    "itself: small": ("torch.tanh(x) * 2", "64, 256"),
}
PROBLEM = """import torch
class {name}(torch.nn.Module):
    def forward(self, x):
        return {body}
def get_inputs():
    return [torch.rand({shape})]
def get_init_inputs():
    return []
"""


def pairs(lane: str) -> dict[str, Request]:
    """Return a request for each pair by the pair's name."""
    entries = {entry.name: entry for entry in gallery_entries(lane)}
    backend = "triton" if lane == "gpu" else "torch"
    found = {f"{backend} {name}": entries[f"good/{backend}/{name}"].request(lane) for name in KERNELS}
    for name, (body, shape) in ITSELF.items():
        problem, kernel = (PROBLEM.format(name=model, body=body, shape=shape) for model in ("Model", "ModelNew"))
        found[name] = Request(problem=problem, kernel=kernel, backend="torch", lane=lane)
    return found


def percentiles(values: Sequence[float]) -> list[float]:
    """Return the 5th, 50th and 95th percentile."""
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return [round(value, 5) for value in (cuts[0], cuts[9], cuts[18])]


def spread(verdicts: Sequence[Verdict], truth: float | None) -> dict[str, Any]:
    """Return the figures of one pair. ``truth`` is its true speedup if that is known."""
    speedups = [verdict.speedup for verdict in verdicts if verdict.speedup is not None]
    if len(speedups) < 2:
        return {"evaluations": len(verdicts), "timed": len(speedups)}
    middle = statistics.median(speedups) if truth is None else truth
    intervals = [one for verdict in verdicts if (one := getattr(verdict, "speedup_interval", None)) is not None]
    found = {
        "evaluations": len(verdicts),
        "timed": len(speedups),
        "clock": sorted({str(verdict.timing_basis) for verdict in verdicts}),
        "speedup": percentiles(speedups),
        "runtime_us": percentiles([1e3 * verdict.runtime_ms for verdict in verdicts if verdict.runtime_ms is not None]),
        "baseline_us": percentiles(
            [1e3 * verdict.baseline_ms for verdict in verdicts if verdict.baseline_ms is not None]
        ),
    }
    if intervals:
        found["covered"] = round(sum(low <= middle <= high for low, high in intervals) / len(intervals), 3)
        found["width"] = round(statistics.median((high - low) / 2 for low, high in intervals) / middle, 4)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder for the figures")
    parser.add_argument("--lane", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--slots", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=40, help="evaluations of each pair (40)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    made = pairs(options.lane)
    names = [name for name in made for _ in range(options.rounds)]
    random.shuffle(names)
    with fleet(options.lane, options.slots) as client:
        client.wait_all(client.submit_batch(list(made.values())), timeout=PATIENCE_S)
        verdicts = client.wait_all(client.submit_batch([made[name] for name in names]), timeout=PATIENCE_S)
    figures: dict[str, Any] = {"about": about(options.lane), "slots": options.slots, "pairs": {}}
    for name in made:
        of_one = [verdict for each, verdict in zip(names, verdicts, strict=True) if each == name]
        figures["pairs"][name] = spread(of_one, 1.0 if name in ITSELF else None)
        print(name, json.dumps(figures["pairs"][name]), flush=True)
    (options.out / "repeat.json").write_text(json.dumps(figures, indent=1) + "\n")
    failed = [f"{name}: {verdict.message}" for name, verdict in zip(names, verdicts, strict=True) if not verdict.passed]
    print(f"{len(failed)} of {len(verdicts)} did not pass", *failed[:5], sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    sys.exit(main())
