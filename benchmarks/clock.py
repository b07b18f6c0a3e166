"""Compare the judge's clock with other clocks: `python benchmarks/clock.py [--out DIR] [--rounds 3] [--only spin]`.

Known-duration kernels of 1 to 5000 us, a kernel that waits for the GPU, and real kernels in Triton and torch are timed
in one run on one GPU, alternately by

- the whole fleet, started in a temporary home: the verdict's ``runtime``.
- a fresh process (``own_clocks.py``): its events, a CUDA graph's replay, ``triton.testing.do_bench``, and CUPTI, each
  with a cold L2.

The table has each method's median over the rounds for each kernel, in microseconds. After it come the difference
between the judge's and CUPTI's times of the known-duration kernels, the saving by a stop at a precision (the default)
instead of after exactly 100 calls, and the duration of an evaluation and of its exclusive use of the GPU. The figures
are printed and, with ``--out``, written as JSON together with the fleet's logs. The exit status is 0 if the expected
clock measured every time, regardless of the times.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from kqueue import Client, Verdict
from kqueue.config import load
from kqueue.contract import Purpose, Request, Settings, Timing
from kqueue.local.fleet import LocalFleet
from workers.judge.gpu import devices

EXAMPLES: Final = Path(__file__).resolve().parents[1] / "examples"
OWN_CLOCKS: Final = Path(__file__).resolve().with_name("own_clocks.py")
LANE: Final = "gpu"
METHODS: Final = ("events", "graph", "do_bench", "cupti")
SPINS_US: Final = (1, 10, 50, 500, 5000)
#: Duration in microseconds of the kernel that waits for the GPU.
SYNC_US: Final = 50
#: Cycles of two known-duration kernels, whose times give the cycles per microsecond.
CALIBRATION: Final = (2_000_000, 4_000_000)
#: Number of processes that import torch before they get a job.
ENQUEUE: Final = 2
#: Deadline in seconds of a process's measurement and of a verdict.
PATIENCE_S: Final = 300.0
#: Acceptable difference from CUPTI: microseconds, plus a share of the time.
GOAL: Final = (1.0, 0.01)

SPIN_PROBLEM: Final = """
import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 1.0


def get_inputs():
    return [torch.randn(8192)]


def get_init_inputs():
    return []
"""
#: One launch. Pointers are passed as numbers, the cheapest way to launch.
SPIN_KERNEL: Final = '''
import cupy
import torch

spin = cupy.RawKernel(
    r"""
extern "C" __global__ void spin(const float* x, float* out, const long long n, const long long cycles) {
    const long long begun = clock64();
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i];
    while (clock64() - begun < cycles) {}
}
""",
    "spin",
)


class ModelNew(torch.nn.Module):
    def forward(self, x):
        out = torch.empty_like(x)
        n = x.numel()
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            spin(((n + 255) // 256,), (256,), (x.data_ptr(), out.data_ptr(), n, CYCLES))
        AFTERWARDS
        return out
'''
#: Backend, kernel of the gallery, input size of its problem in the gallery, and input size in this benchmark.
REAL: Final = (
    ("triton", "gelu", "512, 1024", "512, 1024"),
    ("triton", "gelu", "512, 1024", "8192, 4096"),
    ("triton", "softmax", "256, 2048", "256, 2048"),
    ("triton", "softmax", "256, 2048", "8192, 2048"),
    ("triton", "layer_norm", "256, 1024", "256, 1024"),
    ("triton", "matmul", "256, 256", "256, 256"),
    ("triton", "matmul", "256, 256", "1024, 1024"),
    ("torch", "softmax", "256, 2048", "256, 2048"),
    ("torch", "matmul", "256, 256", "1024, 1024"),
)


class UnmeasuredError(Exception):
    """A method could not time a kernel, or timed it by an unexpected clock."""


@dataclass(frozen=True, slots=True)
class Row:
    """A kernel to time.

    Attributes:
        spin: True for a known-duration kernel.
        waits: True if its forward waits for the GPU. The judge must then time it by the CPU's clock, and it has no
            CUDA graph.
    """

    name: str
    problem: str
    kernel: str
    backend: str
    spin: bool = False
    waits: bool = False

    def request(self, timing: Timing | None = None) -> Request:
        return Request(
            problem=self.problem,
            kernel=self.kernel,
            backend=self.backend,
            lane=LANE,
            settings=Settings(timing=timing or Timing()),
            kernel_label=self.name,
            batch="clock",
        )

    def job(self, methods: Sequence[str] = METHODS) -> dict[str, Any]:
        """Return the job for ``own_clocks.py``."""
        wanted = [method for method in methods if not (self.waits and method == "graph")]
        return {"problem": self.problem, "kernel": self.kernel, "methods": wanted}


class OwnClocks:
    """Fresh processes, one per kernel, which import torch while the judge is busy with another kernel."""

    def __init__(self, environment: dict[str, str], program: Path = OWN_CLOCKS) -> None:
        """Configure the processes. The ``with`` statement starts the first of them."""
        self._command = [sys.executable, str(program)]
        self._environment = environment
        self._waiting: deque[subprocess.Popen[str]] = deque()

    def __enter__(self) -> Self:
        self._fill()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._waiting:
            process.kill()
            process.communicate()

    def measure(self, job: dict[str, Any]) -> dict[str, Any]:
        """Run a job in the next process and return its answer.

        Raises:
            UnmeasuredError: the process failed or took too long.
        """
        process = self._waiting.popleft()
        self._fill()
        try:
            answer, errors = process.communicate(json.dumps(job) + "\n", timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise UnmeasuredError(f"the process took more than {PATIENCE_S:.0f} s") from None
        if process.returncode != 0 or not answer.strip():
            raise UnmeasuredError(f"the process exited with {process.returncode}:\n{errors.strip()[-2000:]}")
        return json.loads(answer)

    def _fill(self) -> None:
        while len(self._waiting) < ENQUEUE:
            pipe = subprocess.PIPE
            self._waiting.append(
                subprocess.Popen(self._command, env=self._environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
            )


def spin_row(name: str, cycles: int, *, waits: bool = False) -> Row:
    """Return a kernel that copies its input and spins for ``cycles``."""
    kernel = SPIN_KERNEL.replace("CYCLES", str(cycles))
    kernel = kernel.replace("        AFTERWARDS\n", "        torch.cuda.synchronize()\n" if waits else "")
    return Row(name, SPIN_PROBLEM, kernel, "cupy", spin=not waits, waits=waits)


def real_row(backend: str, name: str, given: str, wanted: str) -> Row:
    """Return a kernel of the gallery, with its problem's inputs in another size."""
    problem = (EXAMPLES / "problems" / f"{name}.py").read_text(encoding="utf-8")
    assert f"({given})" in problem, f"the gallery's problem {name} has other inputs than {given}"
    kernel = (EXAMPLES / "kernels" / "good" / backend / f"{name}.py").read_text(encoding="utf-8")
    size = wanted.replace(", ", "x")
    return Row(f"{backend} {name} {size}", problem.replace(f"({given})", f"({wanted})"), kernel, backend)


def all_rows(cycles_per_us: float) -> list[Row]:
    spins = [spin_row(f"spin {us} us", round(us * cycles_per_us)) for us in SPINS_US]
    waits = spin_row(f"sync {SYNC_US} us", round(SYNC_US * cycles_per_us), waits=True)
    return [*spins, waits, *(real_row(*real) for real in REAL)]


def calibrate(own: OwnClocks) -> float:
    """Return the SM clock's cycles per microsecond, from CUPTI's records of two known-duration kernels."""
    times = [
        own.measure(spin_row("calibration", cycles).job(["cupti"]))["cupti"]["median_us"] for cycles in CALIBRATION
    ]
    return (CALIBRATION[1] - CALIBRATION[0]) / (times[1] - times[0])


def figures(row: Row, verdict: Verdict) -> dict[str, Any]:
    """Return the times in a verdict.

    Raises:
        UnmeasuredError: the kernel did not pass, or was timed by an unexpected clock.
    """
    taken, baseline = verdict.runtime, verdict.baseline
    if taken is None:
        raise UnmeasuredError(f"judged {verdict.category}: {verdict.message[:500]}\n{verdict.log[-1000:]}")
    wanted = "cpu_clock" if row.waits else "gpu_clock"
    if taken.basis != wanted:
        raise UnmeasuredError(f"timed by {taken.basis}, not by {wanted}")
    return {
        "median_us": taken.median_ms * 1e3,
        "q1_us": taken.q1_ms * 1e3,
        "q3_us": taken.q3_ms * 1e3,
        "null_us": taken.overhead_ms * 1e3,
        "basis": taken.basis,
        "count": taken.count,
        "discarded": taken.discarded,
        "precision": taken.precision,
        "clocks": taken.clocks.model_dump(),
        "baseline_us": baseline.median_ms * 1e3 if baseline else None,
        "durations_s": verdict.evidence.durations_s,
        "environment": verdict.environment and verdict.environment.model_dump(),
    }


def judged(kq: Client, row: Row) -> dict[str, Any]:
    """Submit one evaluation. Return the fleet's figures with the seconds until the verdict."""
    begun = time.monotonic()
    verdict = kq.submit(row.request()).wait(timeout=PATIENCE_S)
    latency = time.monotonic() - begun
    return figures(row, verdict) | {"latency_s": latency}


def judged_in_full(kq: Client, rows: list[Row], failed: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return the fleet's figures of each row precise enough to publish, by the row's name."""
    timing = Timing(purpose=Purpose.PUBLISH)
    tickets = kq.submit_batch([row.request(timing) for row in rows])
    found: dict[str, dict[str, Any]] = {}
    for row, verdict in zip(rows, kq.wait_all(tickets, timeout=PATIENCE_S * len(rows)), strict=True):
        try:
            found[row.name] = figures(row, verdict)
        except UnmeasuredError as error:
            failed[f"{row.name}, 100 calls"] = str(error)
    return found


def in_turns(
    kq: Client,
    own: OwnClocks,
    rows: list[Row],
    rounds: int,
    found: dict[str, list[dict[str, Any]]],
    failed: dict[str, str],
) -> None:
    """Time all rows by the fleet and by a fresh process, in alternating order. Append each result to ``found``."""
    for number in range(rounds):
        for row in rows:
            print(f"-- round {number + 1} of {rounds}: {row.name}", flush=True)
            try:
                if number % 2:
                    theirs = own.measure(row.job())
                    found[row.name].append({"judge": judged(kq, row), "own": theirs})
                else:
                    ours = judged(kq, row)
                    found[row.name].append({"judge": ours, "own": own.measure(row.job())})
            except UnmeasuredError as error:
                failed[f"{row.name}, round {number + 1}"] = str(error)
                print(f"   not measured: {error}", flush=True)


def baseline_was_known(one: dict[str, Any]) -> bool:
    """Return whether an evaluation timed only its kernel. A problem's first evaluation times the reference too."""
    return "baseline" not in one["judge"]["durations_s"]


def summary(row: Row, rounds: list[dict[str, Any]], full: dict[str, Any] | None) -> dict[str, Any]:
    """Return a row's medians over the rounds, and their differences."""

    def over(who: str, *path: str, among: list[dict[str, Any]] = rounds) -> float | None:
        values: list[float] = []
        for one in among:
            value: Any = one[who]
            for key in path:
                value = value.get(key) if value is not None else None
            if value is not None:
                values.append(value)
        return statistics.median(values) if values else None

    judge, cupti, events = (
        over("judge", "median_us"),
        over("own", "cupti", "median_us"),
        over("own", "events", "median_us"),
    )
    known = [one for one in rounds if baseline_was_known(one)]
    return {
        "name": row.name,
        "spin": row.spin,
        "basis": rounds[0]["judge"]["basis"],
        "judge_us": judge,
        "judge_spread_us": statistics.median(one["judge"]["q3_us"] - one["judge"]["q1_us"] for one in rounds),
        "null_us": over("judge", "null_us"),
        "cupti_us": cupti,
        "cupti_busy_us": over("own", "cupti_busy", "median_us"),
        "kernels": over("own", "kernels"),
        "events_us": events,
        "graph_us": over("own", "graph", "median_us"),
        "do_bench_us": over("own", "do_bench", "median_us"),
        "minus_cupti_us": _difference(judge, cupti),
        "minus_events_us": _difference(judge, events),
        "judge_sm_mhz": over("judge", "clocks", "sm_mhz"),
        "own_sm_mhz": over("own", "sm_mhz"),
        "count": over("judge", "count"),
        "time_s": over("judge", "durations_s", "time"),
        "latency_s": over("judge", "latency_s", among=known),
        "alone_measure_s": over("judge", "durations_s", "alone_measure", among=known),
        "full_judge_us": full["median_us"] if full else None,
        "full_count": full["count"] if full else None,
        "full_time_s": full["durations_s"]["time"] if full else None,
    }


def overall(summaries: list[dict[str, Any]], rounds: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the differences of known-duration kernels from CUPTI, and the costs with a known baseline."""
    apart = {one["name"]: abs(one["minus_cupti_us"]) for one in summaries if one["spin"]}
    allowed = {one["name"]: GOAL[0] + GOAL[1] * one["cupti_us"] for one in summaries if one["spin"]}
    known = [one["judge"] for one in rounds if baseline_was_known(one)]
    names = sorted({name for one in known for name in one["durations_s"]})
    return {
        "spins": len(apart),
        "spins_largest_difference_us": max(apart.values(), default=None),
        "spins_median_difference_us": statistics.median(apart.values()) if apart else None,
        "spins_beyond_1_us_and_1_percent": [name for name in apart if apart[name] > allowed[name]],
        "evaluations_with_known_baseline": len(known),
        "latency_p50_s": statistics.median(one["latency_s"] for one in known) if known else None,
        "stages_p50_s": {name: statistics.median(one["durations_s"].get(name, 0.0) for one in known) for name in names},
    }


def _difference(a: float | None, b: float | None) -> float | None:
    return a - b if a is not None and b is not None else None


def table(summaries: list[dict[str, Any]]) -> str:
    """Format the rows: times in microseconds, stages in seconds."""
    columns = (
        ("kernel", "name", ""),
        ("judge", "judge_us", ".2f"),
        ("q3-q1", "judge_spread_us", ".2f"),
        ("CUPTI", "cupti_us", ".2f"),
        ("busy", "cupti_busy_us", ".2f"),
        ("kernels", "kernels", ".0f"),
        ("events", "events_us", ".2f"),
        ("graph", "graph_us", ".2f"),
        ("do_bench", "do_bench_us", ".2f"),
        ("-CUPTI", "minus_cupti_us", "+.2f"),
        ("-events", "minus_events_us", "+.2f"),
        ("null", "null_us", ".0f"),
        ("basis", "basis", ""),
        ("calls", "count", ".0f"),
        ("time_s", "time_s", ".3f"),
        ("alone_s", "alone_measure_s", ".3f"),
        ("of 100", "full_judge_us", ".2f"),
        ("time_s", "full_time_s", ".3f"),
    )
    lines = [[title for title, _, _ in columns]]
    lines += [["-" if one[key] is None else format(one[key], form) for _, key, form in columns] for one in summaries]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="directory for clock.json and the fleet's logs")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each kernel by both (default 3)")
    parser.add_argument("--only", action="append", help="only kernels whose name contains this, repeatable")
    parser.add_argument(
        "--slots",
        type=int,
        default=os.environ.get("KQUEUE_SLOTS_PER_GPU") or "1",
        help="slots per GPU (KQUEUE_SLOTS_PER_GPU, else 1)",
    )
    options = parser.parse_args(given)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def chosen(rows: list[Row], only: list[str] | None) -> list[Row]:
    """Return the selected rows, or exit if there are none."""
    rows = [row for row in rows if not only or any(part in row.name for part in only)]
    if not rows:
        sys.exit(f"clock: no kernel's name contains {' or '.join(map(repr, only or []))}")
    return rows


def gpu() -> str:
    """Return the UUID of the first GPU that the fleet would use, or exit without one."""
    found = devices.choose(load().gpus, devices.devices(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not found:
        sys.exit("clock: no NVIDIA GPU found (nvidia-smi must list one)")
    return found[0].uuid


def main() -> int:
    options = arguments()
    uuid = gpu()
    chosen(all_rows(1.0), options.only)
    root = Path(tempfile.mkdtemp(prefix="kqueue-clock-"))
    root.chmod(0o711)
    caches = {"TRITON_CACHE_DIR": str(root / "triton"), "CUPY_CACHE_DIR": str(root / "cupy")}
    environment = os.environ | caches | {"CUDA_VISIBLE_DEVICES": uuid}
    shown: dict[str, Any] = {"slots_per_gpu": options.slots, "rounds": options.rounds}
    failed: dict[str, str] = {}
    begun = time.monotonic()
    try:
        with contextlib.ExitStack() as stack:
            own = stack.enter_context(OwnClocks(environment))
            shown["cycles_per_us"] = calibrate(own)
            print(f"SM clock: {shown['cycles_per_us']:.1f} cycles per microsecond", flush=True)
            rows = chosen(all_rows(shown["cycles_per_us"]), options.only)
            config = load(
                reuse=False,
                home=root / "home",
                scratch=root / "scratch",
                gpus=uuid,
                slots_per_gpu=options.slots,
                cpu_slots=0,
            )
            fleet = stack.enter_context(LocalFleet(config, durable=False))
            kq = stack.enter_context(fleet.client())
            measured: dict[str, list[dict[str, Any]]] = {row.name: [] for row in rows}
            shown["measured"] = measured
            in_turns(kq, own, rows, options.rounds, measured, failed)
            shown["in_full"] = judged_in_full(kq, rows, failed)
        shown["rows"] = [
            summary(row, measured[row.name], shown["in_full"].get(row.name)) for row in rows if measured[row.name]
        ]
        shown["overall"] = overall(shown["rows"], [one for rounds in measured.values() for one in rounds])
        print(table(shown["rows"]))
        print(json.dumps(shown["overall"], indent=1))
    except UnmeasuredError as error:
        failed["calibration"] = str(error)
    finally:
        shown |= {"failed": failed, "seconds": round(time.monotonic() - begun, 1)}
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "clock.json").write_text(json.dumps(shown, indent=1, default=str))
            for log in (root / "home" / "logs").glob("*.log"):
                shutil.copy(log, options.out / log.name)
        shutil.rmtree(root, ignore_errors=True)
    for name, why in failed.items():
        print(f"not measured: {name}: {why}")
    print(f"{shown['seconds']} s; {len(failed)} measurements failed")
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    sys.exit(main())
