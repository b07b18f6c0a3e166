"""Kernels that span two GPUs: `python benchmarks/world.py [--device cpu] [--out FILE]`.

It judges an all-reduce, an all-gather with a product, and a reduce-scatter with a norm, each right, wrong on one rank,
hanging on one rank and out of memory on one rank. The right kernel is the problem's own model, so its speedup should be
1. On GPUs it also judges the all-reduce by torch's symmetric memory (`--only symmetric`). Before and after, it judges a
kernel for one GPU, and at the end it looks for processes and GPU memory that are left. The exit status is 0 only if all
is as expected. After 220 seconds it begins no further case, and says so.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from kqueue import LocalJudge
from kqueue.config import load
from kqueue.contract import Outcome
from workers.judge.gpu import devices

_MOST_S: Final = 220.0
_HEAD: Final = """
import time
import torch
import torch.distributed as dist

WORLD = 2
"""
_ONE: Final = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1
def get_inputs():
    return [torch.rand({rows}, 1024)]
"""
#: Bodies of forward, with {before} for what a broken kernel does first, and the shape of the inputs.
_FORWARDS: Final = {
    "all_reduce": ("out = x.clone()\n        dist.all_reduce(out)", "({n}, 1024)"),
    "all_gather_product": (
        (
            "whole = x.new_empty(2 * x.shape[0], x.shape[1])\n"
            "        dist.all_gather_into_tensor(whole, x)\n"
            "        out = whole @ w"
        ),
        "({n}, 1024)",
    ),
    "reduce_scatter_norm": (
        (
            "part = x.new_empty(x.shape[0] // 2, x.shape[1])\n"
            "        dist.reduce_scatter_tensor(part, x)\n"
            "        out = torch.nn.functional.layer_norm(part, part.shape[1:])"
        ),
        "({n}, 1024)",
    ),
}
#: Lines of a kernel before and after the right work, and the expected category on a GPU and on the CPU.
_VARIANTS: Final = {
    "right": ("", "", "passed", "passed"),
    "wrong": ("", "out = out + dist.get_rank()", "wrong_values", "wrong_values"),
    "hanging": ("while dist.get_rank() == 1: time.sleep(0.1)", "", "timeout", "timeout"),
    "out_of_memory": (
        "if dist.get_rank() == 1: x.new_ones(1 << 38)",
        "",
        "gpu_out_of_memory",
        "host_out_of_memory",
    ),
}
#: Kernel of the all-reduce: each rank reads the other's memory.
_SYMMETRIC: Final = """import torch.distributed._symmetric_memory as symmetric

class ModelNew(torch.nn.Module):
    def forward(self, x):
        if not hasattr(self, "own"):
            self.own = symmetric.empty(x.shape, dtype=x.dtype, device=x.device)
            self.shared = symmetric.rendezvous(self.own, dist.group.WORLD)
        self.own.copy_(x)
        self.shared.barrier()
        out = x + self.shared.get_buffer(1 - dist.get_rank(), x.shape, x.dtype)
        self.shared.barrier()
        return out
"""


def main() -> int:
    """Judge all cases, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cpu, or by default the first GPU, with the second")
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the outcomes there, as JSON")
    options = parser.parse_args()
    on_gpu, begun, rows, faults = options.device != "cpu", time.monotonic(), list[dict[str, Any]](), list[str]()
    before = _used()
    with tempfile.TemporaryDirectory(prefix="kqueue-world-") as folder:
        Path(folder).chmod(0o711)
        config = load(home=Path(folder, "home"), scratch=Path(folder, "scratch"))
        with LocalJudge(options.device, config=config) as judge:
            single = _ONE.format(rows=4096 if on_gpu else 16)
            alone = [_alone(judge, single) for _ in range(2)][1:]
            for name, (problem, kernel, expected) in _cases(on_gpu=on_gpu).items():
                if options.only and options.only not in name:
                    continue
                if time.monotonic() > begun + _MOST_S:
                    faults.append(f"{name} and later cases were not begun, for lack of time")
                    break
                rows.append(_judged(judge, name, problem, kernel, expected))
                if not rows[-1]["as_expected"]:
                    faults.append(f"{name}: {rows[-1]['category']}: {rows[-1]['message']}")
            alone += [_alone(judge, single) for _ in range(2)]
    for when, one in zip(("before", "after", "after that"), alone, strict=True):
        print(f"one GPU {when}: {one['category']} in {one['seconds']} s, {one['runtime_ms']} ms", flush=True)
    left = {uuid: used - before.get(uuid, 0) for uuid, used in _used().items()}
    print("GPU memory more than before, in bytes:", left or "no GPU", flush=True)
    if any(more > 64 << 20 for more in left.values()):
        faults.append(f"GPU memory is left in use: {left}")
    if options.out:
        options.out.write_text(json.dumps({"cases": rows, "alone": alone, "left": left}, indent=1))
    right = sum(row["as_expected"] for row in rows)
    print(f"{right} of {len(rows)} cases as expected", *faults, sep="\n")
    return bool(faults)


def _cases(*, on_gpu: bool) -> dict[str, tuple[str, str, str]]:
    """Return problem, kernel and expected category by the name of the case."""
    cases = dict[str, tuple[str, str, str]]()
    rows = 32768 if on_gpu else 256
    for name, (body, shape) in _FORWARDS.items():
        inputs = f"torch.randn{shape.format(n=rows)}"
        weights = ", torch.randn(1024, 1024) / 32" if "w" in body.split() else ""
        arguments = "x, w" if weights else "x"
        problem = f"{_HEAD}\n{_model('Model', arguments, body)}\ndef get_inputs():\n    return [{inputs}{weights}]\n"
        for variant, (first, last, on_a_gpu, on_a_cpu) in _VARIANTS.items():
            kernel = _HEAD + _model("ModelNew", arguments, body, first, last)
            cases[f"{name}/{variant}"] = problem, kernel, on_a_gpu if on_gpu else on_a_cpu
    if on_gpu:
        cases["all_reduce/symmetric"] = cases["all_reduce/right"][0], _HEAD + _SYMMETRIC, "passed"
    return cases


def _model(name: str, arguments: str, *lines: str) -> str:
    body, first, last = (*lines, "", "")[:3]
    text = "\n".join(f"        {line}" for line in (first, body, last, "return out") if line)
    return f"class {name}(torch.nn.Module):\n    def forward(self, {arguments}):\n{text}\n"


def _judged(judge: LocalJudge, name: str, problem: str, kernel: str, expected: str) -> dict[str, Any]:
    settings = {"checks": 3, "max_attempts": 1, "deadlines": {"check_s": 8.0, "time_s": 20.0}}
    at = time.monotonic()
    outcome = judge(problem=problem, kernel=kernel, backend="torch", settings=settings)
    rank, seconds = outcome.facts.rank, round(time.monotonic() - at, 2)
    as_expected = outcome.category == expected and (rank == 1 or outcome.passed)
    print(f"{'ok' if as_expected else 'UNEXPECTED'} {name}: {outcome.category}, {outcome.message[:300]}, {seconds} s")
    if outcome.passed:
        print(f"   {outcome.runtime_ms} ms, itself {outcome.baseline_ms} ms, {outcome.speedup_interval}", flush=True)
    elif not as_expected:
        print(outcome.log[-3000:], flush=True)
    times = {"runtime_ms": outcome.runtime_ms, "baseline_ms": outcome.baseline_ms, "speedup": outcome.speedup}
    found = {"case": name, "category": outcome.category, "rank": rank, "message": outcome.message, "seconds": seconds}
    durations = outcome.evidence.durations_s
    return {**found, **times, "interval": outcome.speedup_interval, "as_expected": as_expected, "steps": durations}


def _alone(judge: LocalJudge, problem: str) -> dict[str, Any]:
    at = time.monotonic()
    outcome: Outcome = judge(problem=problem, kernel=problem.replace("Model(", "ModelNew("), backend="torch")
    seconds = round(time.monotonic() - at, 2)
    return {"category": outcome.category, "seconds": seconds, "runtime_ms": outcome.runtime_ms}


def _used() -> dict[str, int]:
    """Return the bytes of memory in use on each GPU."""
    import pynvml

    found = dict[str, int]()
    for device in devices.devices():
        with devices.opened(device.uuid) as handle:
            found[device.uuid] = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    return found


if __name__ == "__main__":
    sys.exit(main())
