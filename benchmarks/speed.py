"""Measure how fast small kernels are judged: `python benchmarks/speed.py --out DIR [--slots N,...] [--gpus N,...]`.

For each number of GPUs, and each number of slots on each of them, it starts a fleet. After a warm-up with two kernels
of each problem for each slot it judges

1. right kernels of seven problems in one batch, all different. It measures evaluations per second, the host's CPU time,
   the exclusive use of the device, and the duration of each stage.
2. the same kernels again, without reuse of verdicts. Their compiled code is known by then.
3. an equal number of kernels, three of ten faulty. It measures evaluations per second, and checks each category.

It reports each kernel's time in the verdicts of the busy and of the idle fleet, which must not differ. It also reports
each batch's seconds as a multiple of the exclusive use of the device by its evaluations.

On the first fleet, once it is idle, it judges one kernel after the other: new and known Triton kernels, and torch
kernels. For comparison it runs a simple script, a fresh Python process for each of the same kernels, which compares
five answers with `torch.allclose` and times a hundred calls.

With several numbers of GPUs it only compares them, within `--seconds` (140): new right kernels on a fleet of each, and
before it the CUDA contexts that the driver makes for these GPUs in a second, of which the evaluations use a share.

The host must be quiet, because all of its CPU time is counted. Figures go to `DIR/speed.json`, pictures to
`DIR/speed.svg` and `DIR/stages.svg`. The exit status is 0 only if every category is the expected one. With `--lane cpu`
it measures torch kernels on CPU slots, to test the benchmark itself.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import pygal
from gallery import Entry
from gallery import entries as gallery

from kqueue import Client, Request, Verdict
from kqueue.config import load
from kqueue.errors import WaitTimeout
from kqueue.local.fleet import LocalFleet
from workers.contexts import rate
from workers.judge.gpu.devices import choose, devices

SMALL = ("gelu", "row_sum", "softmax", "layer_norm", "linear_relu", "row_max", "matmul")
#: Faulty kernels that end quickly.
FAULTY = {
    "gpu": ("bad/illegal_memory_access_triton", "bad/segfault", "bad/wrong_values_triton", "bad/nan", "bad/abort"),
    "cpu": ("bad/segfault", "bad/wrong_values_torch", "bad/nan", "bad/abort"),
}
#: Stages that are not part of another stage.
APART = ("reference", "untimed_reference", "construct", "alone_measure", "provenance", "untimed_verify")
#: Deadline in seconds of each batch, evaluation and process.
PATIENCE_S = 900.0
#: Seconds for the end of a fleet, and the maximum number of evaluations a second on a GPU or a CPU slot.
END_S, MOST_PER_S = 12.0, 12
#: Simple script that judges one kernel. Its arguments are the problem, the kernel and the device.
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
    """Creates requests for kernels that all differ."""

    lane: str
    given: int = 0
    entries: dict[str, Entry] = field(init=False)

    def __post_init__(self) -> None:
        self.entries = {entry.name: entry for entry in gallery(self.lane)}

    def new(self, name: str) -> Request:
        """Return a request for a new kernel."""
        self.given += 1
        request = self.entries[name].request(self.lane)
        return request.model_copy(update={"kernel": f"{request.kernel}\nSALT = {self.given}\n"})

    def right(self, backend: str) -> Iterator[str]:
        """Return an endless iterator over the names of right kernels."""
        return cycle(f"good/{backend}/{name}" for name in SMALL)


@contextmanager
def fleet(lane: str, slots: int, gpus: Sequence[str] | None = None) -> Generator[Client]:
    """Run a fleet with this many slots on each GPU, or on the CPU, in a temporary home.

    Args:
        gpus: the UUIDs of the GPUs to use, instead of all.
    """
    with tempfile.TemporaryDirectory(prefix="kqueue-speed-") as folder:
        root = Path(folder)
        root.chmod(0o711)  # candidates with other uids must reach their scratch directories
        kinds = {"slots_per_gpu": slots, "cpu_slots": 0} if lane == "gpu" else {"cpu_slots": slots}
        if gpus is not None:
            kinds |= {"gpus": ",".join(gpus) or "none"}
        config = load(home=root / "home", scratch=root / "scratch", reuse=False, probe_share=0, **kinds)
        with LocalFleet(config, durable=False) as running, running.client() as client:
            yield client


def cpu_seconds() -> float:
    """Return the busy CPU time of this host in seconds."""
    ticks = list(map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]))
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def judge(client: Client, requests: Sequence[Request]) -> tuple[list[Verdict], dict[str, Any]]:
    """Judge a batch. Return the verdicts and the figures."""
    busy, begun = cpu_seconds(), time.monotonic()
    verdicts = client.wait_all(client.submit_batch(list(requests)), timeout=PATIENCE_S)
    took = time.monotonic() - begun
    exclusive = sum(sum(exclusive_s(verdict)) for verdict in verdicts)
    return verdicts, {
        "evaluations": len(verdicts),
        "seconds": round(took, 2),
        "times_alone": round(took / exclusive, 2) if exclusive else None,
        "per_s": round(len(verdicts) / took, 3),
        "cpu_s": round((cpu_seconds() - busy) / len(verdicts), 2),
        "attempts": Counter(verdict.attempts for verdict in verdicts),
        "categories": Counter(str(verdict.category) for verdict in verdicts),
    }


def exclusive_s(verdict: Verdict) -> Iterator[float]:
    """Return the seconds of each exclusive use of the device by an evaluation."""
    return (seconds for name, seconds in (verdict.evidence.durations_s or {}).items() if name.startswith("alone_"))


def stages(verdicts: Sequence[Verdict]) -> dict[str, float]:
    durations = [verdict.evidence.durations_s or {} for verdict in verdicts]
    names = sorted(set().union(*durations))
    return {name: round(statistics.median(one.get(name, 0.0) for one in durations), 4) for name in names}


def times(names: Sequence[str], verdicts: Sequence[Verdict]) -> dict[str, dict[str, float]]:
    """Return the median and the interquartile range of each kernel's times in microseconds."""
    found: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(names):
        of_one = [v.runtime_ms * 1e3 for n, v in zip(names, verdicts, strict=True) if n == name and v.runtime_ms]
        if len(of_one) > 1:
            first, median, third = statistics.quantiles(of_one, n=4, method="inclusive")
            found[name] = {"median": round(median, 2), "apart": round(third - first, 2)}
    return found


def throughput(client: Client, kernels: Kernels, slots: int, count: int) -> tuple[dict[str, Any], int]:
    """Measure a busy fleet. Return the figures and the number of unexpected categories."""
    backend = "triton" if kernels.lane == "gpu" else "torch"
    names = kernels.right(backend)
    # Slots keep their references. After this batch each slot has judged most problems.
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
    """Measure an idle fleet. Return the latencies in seconds and the number of kernels that did not pass."""
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
    with tempfile.TemporaryDirectory(prefix="kqueue-plain-") as folder:
        for number, name in enumerate(names):
            request, files = kernels.new(name), [Path(folder, f"{number}-{kind}.py") for kind in ("problem", "kernel")]
            for file, source in zip(files, (request.problem, request.kernel), strict=True):
                file.write_text(source)
            environment = os.environ | {"TRITON_CACHE_DIR": str(Path(folder, f"{number}-cache"))}
            begun = time.monotonic()
            command = [sys.executable, "-c", PLAIN, *map(str, files), device]
            subprocess.run(command, env=environment, check=True, timeout=PATIENCE_S)
            took.append(time.monotonic() - begun)
    return {"evaluations": count, "p50_s": round(statistics.median(took), 3), "per_s": round(count / sum(took), 3)}


def compare(kernels: Kernels, gpus: Sequence[str], slots: int, seconds: float) -> tuple[dict[str, Any], int]:
    """Measure new kernels on a fleet for some seconds. Return the figures and the number of unexpected categories."""
    until = time.monotonic() + seconds - END_S
    contexts = rate(gpus) if gpus else 0.0
    with fleet(kernels.lane, slots, gpus) as client:
        warm, most = max(len(gpus), 1) * slots * len(SMALL), MOST_PER_S * max(len(gpus), 1)
        names = kernels.right("triton" if gpus else "torch")
        left_s = until - time.monotonic()
        tickets = client.submit_batch([kernels.new(name) for name in islice(names, warm + int(most * left_s))])
        done: list[tuple[float, Verdict]] = []
        try:
            for _, verdict in client.as_completed(tickets, timeout=until - time.monotonic()):
                done.append((time.monotonic(), verdict))
        except WaitTimeout:
            pass
    counted = done[min(warm, len(done) // 2) :]
    processes = [verdict.evidence.reference for _, verdict in counted]
    forked = sum(one is None or not one.kept or one.replaced is not None for one in processes)
    per_s = (len(counted) - 1) / (counted[-1][0] - counted[0][0]) if len(counted) > 1 else 0.0
    each = 1 + forked / len(counted) if counted else 0.0
    found = {
        "evaluations": len(counted),
        "seconds": round(counted[-1][0] - counted[0][0], 2) if counted else 0.0,
        "warm_up": len(done) - len(counted),
        "per_s": round(per_s, 3),
        "contexts_per_s": round(contexts, 2),
        "contexts_each": round(each, 2),
        "share_of_contexts": round(per_s * each / contexts, 3) if contexts else None,
    }
    return found, sum(not verdict.passed for _, verdict in done)


def about(lane: str) -> dict[str, Any]:
    """Return the date, the hardware and the versions of this measurement."""
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
    """Draw evaluations per second by slots, and the stages of one evaluation on the idle fleet."""
    bars = pygal.HorizontalBar(js=[], title="Evaluations a second", show_legend=False, print_values=True)
    bars.x_labels = ["a fresh process each", *(f"{slots} slots" for slots in found["slots"])]
    bars.add("", [found["plain"]["per_s"], *(one["per_s"] for one in found["slots"].values())])
    bars.render_to_file(str(to / "speed.svg"))
    pieces = pygal.HorizontalStackedBar(js=[], title="Where one evaluation's seconds go, on an idle fleet")
    pieces.x_labels = list(found["latency"])
    rows = list(found["latency"].values())
    for name in APART:
        pieces.add(name.replace("_", " "), [row["stages_s"].get(name, 0.0) for row in rows])
    rest = [row["p50_s"] - sum(row["stages_s"].get(name, 0.0) for name in APART) for row in rows]
    pieces.add("queue, records, ends", [round(max(seconds, 0.0), 4) for seconds in rest])
    pieces.render_to_file(str(to / "stages.svg"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder for figures and pictures")
    parser.add_argument("--lane", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--slots", help="numbers of slots on each GPU, or on the CPU (4,6,8, or 6 with --seconds)")
    parser.add_argument("--gpus", help="numbers of GPUs (all of this host's)")
    parser.add_argument("--seconds", type=int, help="only compare, within this time. 0 is for all figures")
    parser.add_argument("--evaluations", type=int, default=112, help="evaluations in each measured batch (112)")
    parser.add_argument("--idle", type=int, default=14, help="evaluations of each kind on the idle fleet (14)")
    parser.add_argument("--plain", type=int, default=7, help="processes without a fleet (7)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    kernels = Kernels(options.lane)
    found: dict[str, Any] = {"slots": {}}
    wrong = 0
    have = choose("all", devices(), os.environ.get("CUDA_VISIBLE_DEVICES")) if options.lane == "gpu" else []
    counts = [int(count) for count in options.gpus.split(",")] if options.gpus else [len(have)]
    if max(counts) > len(have):
        parser.error(f"--gpus {options.gpus}: this host has {len(have)}")
    seconds = 140 * (len(counts) > 1) if options.seconds is None else options.seconds
    every = [*product(counts, map(int, (options.slots or ("6" if seconds else "4,6,8")).split(",")))]
    if seconds:
        signal.signal(signal.SIGALRM, signal.default_int_handler)  # ends a fleet that does not start
        signal.alarm(seconds)
    else:
        found["plain"] = plain(kernels, options.plain)
        print("plain", json.dumps(found["plain"]), flush=True)
    begun = time.monotonic()
    for number, (gpus, slots) in enumerate(every):
        name = f"{gpus} x {slots}" if gpus > 1 else str(slots)
        if seconds:
            share = (begun + seconds - END_S - time.monotonic()) / (len(every) - number)
            found["slots"][name], differing = compare(kernels, [gpu.uuid for gpu in have[:gpus]], slots, share)
            wrong += differing
            print(name, "slots", json.dumps(found["slots"][name]), flush=True)
            continue
        with fleet(options.lane, slots, [gpu.uuid for gpu in have[:gpus]]) as client:
            found["slots"][name], differing = throughput(client, kernels, max(gpus, 1) * slots, options.evaluations)
            wrong += differing
            print(name, "slots", json.dumps(found["slots"][name]), flush=True)
            if "latency" not in found:
                found["latency"], differing = latency(client, kernels, options.idle)
                wrong += differing
                print("latency", json.dumps(found["latency"]), flush=True)
    found |= {"about": about(options.lane), "unexpected": wrong}
    (options.out / "speed.json").write_text(json.dumps(found, indent=1) + "\n")
    if not seconds:
        draw(found, options.out)
    print(f"{wrong} unexpected categories")
    return 1 if wrong else 0


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    sys.exit(main())
