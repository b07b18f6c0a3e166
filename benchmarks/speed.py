"""Measure how fast small kernels are judged: `python benchmarks/speed.py --out DIR [--slots N,...] [--evaluations N]`.

For each number of slots it starts a fleet of its own and judges, after two of each problem a slot as a warm-up,

1. right kernels of seven problems in one batch, all different: evaluations a second, the host's CPU time and the time
   for which an evaluation has the device alone, and where an evaluation's time goes;
2. the same kernels again, judged anew: what they compile is known then;
3. as many with three faulty ones among ten: evaluations a second, and whether each category is the expected one.

For each kernel it tells the times that verdicts say, among others and on the idle fleet: they must not differ.
Beside each batch's seconds stands how many times those are of what its evaluations had the device alone for.

On the idle fleet of the first number it judges one after the other: Triton kernels that are new and that were judged
before, and torch kernels. Beside all that it runs what people write in an afternoon: a fresh Python process for each of
the same kernels, one after the other, that compares five answers with `torch.allclose` and times a hundred calls.

The host must be quiet, as all of its CPU time is counted. Figures go to `DIR/speed.json`, pictures to `DIR/speed.svg`
and `DIR/stages.svg`. The exit status is 0 only if every category was the expected one. With `--lane cpu` it measures
torch kernels on CPU slots, to try the benchmark itself.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import pygal
from gallery import Entry
from gallery import entries as gallery

from kqueue import Client, Request, Verdict
from kqueue.config import load
from kqueue.local.fleet import LocalFleet

SMALL = ("gelu", "row_sum", "softmax", "layer_norm", "linear_relu", "row_max", "matmul")
#: Faulty kernels that end soon.
FAULTY = {
    "gpu": ("bad/illegal_memory_access_triton", "bad/segfault", "bad/wrong_values_triton", "bad/nan", "bad/abort"),
    "cpu": ("bad/segfault", "bad/wrong_values_torch", "bad/nan", "bad/abort"),
}
#: Stages that do not lie within others.
APART = ("reference", "untimed_reference", "construct", "alone_measure", "provenance", "untimed_verify")
#: Seconds in which all that is waited for must end.
PATIENCE_S = 900.0
#: Judges one kernel as a script would; its arguments: the problem, the kernel, the device.
PLAIN = """
import importlib.util, sys, time
import torch

def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module

problem, kernel, device = load("problem", sys.argv[1]), load("kernel", sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
model = problem.Model(*problem.get_init_inputs()).to(device)
torch.manual_seed(0)
new = kernel.ModelNew(*problem.get_init_inputs()).to(device)
with torch.no_grad():
    for seed in range(5):
        torch.manual_seed(seed)
        inputs = [x.to(device) for x in problem.get_inputs()]
        pair = [y if isinstance(y, tuple) else (y,) for y in (model(*inputs), new(*inputs))]
        assert all(torch.allclose(a, b, rtol=1e-2, atol=1e-2) for a, b in zip(*pair, strict=True))
    for one in (model, new):
        for _ in range(100):
            one(*inputs)
            if device == "cuda":
                torch.cuda.synchronize()
"""


@dataclass
class Kernels:
    """Gives requests for kernels, each one different from all before."""

    lane: str
    given: int = 0
    entries: dict[str, Entry] = field(init=False)

    def __post_init__(self) -> None:
        """Read the gallery."""
        self.entries = {entry.name: entry for entry in gallery(self.lane)}

    def new(self, name: str) -> Request:
        """Return a request for a kernel that nobody has seen."""
        self.given += 1
        request = self.entries[name].request(self.lane)
        return request.model_copy(update={"kernel": f"{request.kernel}\nSALT = {self.given}\n"})

    def right(self, backend: str) -> Iterator[str]:
        """Give names of right kernels, round and round."""
        return cycle(f"good/{backend}/{name}" for name in SMALL)


@contextmanager
def fleet(lane: str, slots: int) -> Generator[Client]:
    """Run a fleet with so many slots in a temporary home."""
    with tempfile.TemporaryDirectory(prefix="kqueue-speed-") as place:
        root = Path(place)
        root.chmod(0o711)  # candidates have users of their own
        kinds = {"slots_per_gpu": slots, "cpu_slots": 0} if lane == "gpu" else {"gpus": "none", "cpu_slots": slots}
        config = load(home=root / "home", scratch=root / "scratch", reuse=False, probe_share=0, **kinds)
        with LocalFleet(config, durable=False) as running, running.client() as client:
            yield client


def cpu_seconds() -> float:
    """Return the CPU time that this host has spent, in seconds, without what it was idle."""
    ticks = list(map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]))
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def judge(client: Client, requests: Sequence[Request]) -> tuple[list[Verdict], dict[str, Any]]:
    """Judge a batch; return the verdicts, and what it took."""
    busy, begun = cpu_seconds(), time.monotonic()
    verdicts = client.wait_all(client.submit_batch(list(requests)), timeout=PATIENCE_S)
    took = time.monotonic() - begun
    alone = sum(sum(alone_of(verdict)) for verdict in verdicts)
    return verdicts, {
        "evaluations": len(verdicts),
        "seconds": round(took, 2),
        "times_alone": round(took / alone, 2) if alone else None,
        "per_s": round(len(verdicts) / took, 3),
        "cpu_s": round((cpu_seconds() - busy) / len(verdicts), 2),
        "attempts": Counter(verdict.attempts for verdict in verdicts),
        "categories": Counter(str(verdict.category) for verdict in verdicts),
    }


def alone_of(verdict: Verdict) -> Iterator[float]:
    """Give the seconds for which an evaluation had its device alone, each time."""
    return (seconds for name, seconds in (verdict.evidence.durations_s or {}).items() if name.startswith("alone_"))


def stages(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Return the median seconds of each stage."""
    told = [verdict.evidence.durations_s or {} for verdict in verdicts]
    return {
        name: round(statistics.median(one.get(name, 0.0) for one in told), 4) for name in sorted(set().union(*told))
    }


def times(names: Sequence[str], verdicts: Sequence[Verdict]) -> dict[str, dict[str, float]]:
    """Return for each kernel the median of its times, and how far its quartiles lie apart, in microseconds."""
    found: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(names):
        of_one = [v.runtime_ms * 1e3 for n, v in zip(names, verdicts, strict=True) if n == name and v.runtime_ms]
        if len(of_one) > 1:
            first, median, third = statistics.quantiles(of_one, n=4, method="inclusive")
            found[name] = {"median": round(median, 2), "apart": round(third - first, 2)}
    return found


def throughput(client: Client, kernels: Kernels, slots: int, count: int) -> tuple[dict[str, Any], int]:
    """Measure a busy fleet; return figures, and how many categories were not the expected ones."""
    backend = "triton" if kernels.lane == "gpu" else "torch"
    names = kernels.right(backend)
    # References are kept by slots: each slot has met most problems then.
    judge(client, [kernels.new(name) for name in islice(names, 2 * len(SMALL) * slots)])
    chosen = list(islice(names, count))
    requests = [kernels.new(name) for name in chosen]
    verdicts, found = judge(client, requests)
    found["times_us"] = times(chosen, verdicts)
    found["alone_s"] = stages(verdicts).get("alone_measure")
    found["stages_s"] = stages(verdicts)
    seen, found["seen"] = judge(client, requests)
    wrong = sum(not verdict.passed for verdict in (*verdicts, *seen))
    faulty = cycle(FAULTY[kernels.lane])
    mixed = [next(faulty) if number % 10 < 3 else next(names) for number in range(count)]
    verdicts, found["mixed"] = judge(client, [kernels.new(name) for name in mixed])
    expected = [kernels.entries[name].expected for name in mixed]
    wrong += sum(verdict.category is not category for verdict, category in zip(verdicts, expected, strict=True))
    return found, wrong


def latency(client: Client, kernels: Kernels, count: int) -> tuple[dict[str, Any], int]:
    """Measure an idle fleet; return seconds from submission to verdict, and how many kernels did not pass."""
    found: dict[str, Any] = {}
    wrong = 0
    backends = ("triton", "torch") if kernels.lane == "gpu" else ("torch",)
    for backend in backends:
        names = list(islice(kernels.right(backend), count))
        requests = [kernels.new(name) for name in names]
        for kind in ("new", "seen"):
            took: list[float] = []
            verdicts: list[Verdict] = []
            for request in requests:
                begun = time.monotonic()
                verdicts.append(client.evaluate(request, timeout=PATIENCE_S))
                took.append(time.monotonic() - begun)
            wrong += sum(not verdict.passed for verdict in verdicts)
            found[f"{backend}, {kind}"] = {
                "p50_s": round(statistics.median(took), 3),
                "max_s": round(max(took), 3),
                "stages_s": stages(verdicts),
                "times_us": times(names, verdicts),
            }
    return found, wrong


def plain(kernels: Kernels, count: int) -> dict[str, Any]:
    """Measure a fresh process for each kernel, one after the other, without a fleet."""
    device = "cuda" if kernels.lane == "gpu" else "cpu"
    names = islice(kernels.right("triton" if kernels.lane == "gpu" else "torch"), count)
    took: list[float] = []
    with tempfile.TemporaryDirectory(prefix="kqueue-plain-") as place:
        for number, name in enumerate(names):
            request, files = kernels.new(name), [Path(place, f"{number}-{kind}.py") for kind in ("problem", "kernel")]
            for file, source in zip(files, (request.problem, request.kernel), strict=True):
                file.write_text(source)
            environment = os.environ | {"TRITON_CACHE_DIR": str(Path(place, f"{number}-cache"))}
            begun = time.monotonic()
            command = [sys.executable, "-c", PLAIN, *map(str, files), device]
            subprocess.run(command, env=environment, check=True, timeout=PATIENCE_S)
            took.append(time.monotonic() - begun)
    return {"evaluations": count, "p50_s": round(statistics.median(took), 3), "per_s": round(count / sum(took), 3)}


def about(lane: str) -> dict[str, Any]:
    """Return when and on what this was measured."""
    import torch
    import triton

    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if lane == "gpu" else "cpu",
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def draw(found: dict[str, Any], to: Path) -> None:
    """Draw evaluations a second by slots, and where the time of one on the idle fleet goes."""
    bars = pygal.HorizontalBar(js=[], title="Evaluations a second", show_legend=False, print_values=True)
    bars.x_labels = ["a fresh process each", *(f"{slots} slots" for slots in found["slots"])]
    bars.add("", [found["plain"]["per_s"], *(one["per_s"] for one in found["slots"].values())])
    bars.render_to_file(str(to / "speed.svg"))
    pieces = pygal.HorizontalStackedBar(js=[], title="Where one evaluation's seconds go, on an idle fleet")
    pieces.x_labels = list(found["latency"])
    rows = list(found["latency"].values())
    for name in APART:
        pieces.add(name.replace("_", " "), [row["stages_s"].get(name, 0.0) for row in rows])
    others = [row["p50_s"] - sum(row["stages_s"].get(name, 0.0) for name in APART) for row in rows]
    pieces.add("queue, records, ends", [round(max(seconds, 0.0), 4) for seconds in others])
    pieces.render_to_file(str(to / "stages.svg"))


def main() -> int:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder for figures and pictures")
    parser.add_argument("--lane", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--slots", default="4,6,8", help="numbers of slots, the first one for the latency (4,6,8)")
    parser.add_argument("--evaluations", type=int, default=112, help="of each batch that counts (112)")
    parser.add_argument("--idle", type=int, default=14, help="of each kind on the idle fleet (14)")
    parser.add_argument("--plain", type=int, default=7, help="processes without a fleet (7)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    kernels = Kernels(options.lane)
    found: dict[str, Any] = {"plain": plain(kernels, options.plain), "slots": {}}
    print("plain", json.dumps(found["plain"]), flush=True)
    wrong = 0
    for slots in map(int, options.slots.split(",")):
        with fleet(options.lane, slots) as client:
            found["slots"][slots], differing = throughput(client, kernels, slots, options.evaluations)
            wrong += differing
            print(slots, "slots", json.dumps(found["slots"][slots]), flush=True)
            if "latency" not in found:
                found["latency"], differing = latency(client, kernels, options.idle)
                wrong += differing
                print("latency", json.dumps(found["latency"]), flush=True)
    found |= {"about": about(options.lane), "unexpected": wrong}
    (options.out / "speed.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found, options.out)
    print(f"{wrong} categories were not the expected ones")
    return 1 if wrong else 0


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    sys.exit(main())
