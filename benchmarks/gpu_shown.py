"""Run the whole fleet on a GPU: `python benchmarks/gpu_shown.py [--out DIR] [--slots N] [--long N]`.

It starts Postgres, Valkey and this machine's workers in a temporary home. Then it

1. judges the gallery's GPU entries and compares every category with the expected one.
2. judges 300 evaluations in one batch, 30 % of them with various faults, and compares again.
3. judges correct small Triton kernels in one batch, for evaluations per second.
4. judges one kernel after another on the idle fleet, for the latency from submission to verdict.
5. measures the time from a segfault, and from a deadline, to its verdict and to the slot's next evaluation.

At the end it checks for leftovers: processes of candidates, GPU memory, and parents of judges or candidates that have
opened the GPU. The figures are printed and, with `--out`, written as JSON. The exit status is 0 only if every category
was as expected and there are no leftovers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from gallery import Entry, entries
from sqlalchemy import create_engine, text

from kqueue import Client, Verdict
from kqueue.config import Config, load
from kqueue.contract import Deadlines
from kqueue.local.fleet import LocalFleet

#: Quick faulty kernels, 30 % of the long run.
FAULTY = (
    "bad/illegal_memory_access_triton",
    "bad/segfault",
    "bad/abort",
    "bad/exit_zero",
    "bad/kill_itself",
    "bad/endless_loop",
    "bad/endless_loop_triton",
    "bad/gpu_memory_bomb",
    "bad/impossible_gpu_allocation",
    "bad/host_memory_bomb",
    "bad/leftover_process",
    "bad/output_flood",
    "bad/wrong_values_triton",
    "bad/wrong_values_torch",
    "bad/nan",
    "bad/wrong_shape",
    "bad/input_mutated",
    "bad/nondeterministic",
    "bad/runtime_error",
    "bad/init_error",
    "bad/import_error",
    "bad/syntax_error",
    "bad/index_out_of_range",
    "bad/too_much_shared_memory_triton",
    "problem/broken_reference",
)
SMALL = ("gelu", "row_sum", "softmax", "layer_norm", "linear_relu", "row_max", "matmul")
#: Seconds after which an idle fleet has no sealed process, with a margin.
KEPT_S = 90.0
TELLS_ITS_DEATH = """
import ctypes, time, torch
class ModelNew(torch.nn.Module):
    def forward(self, *x):
        print("died at", time.time(), flush=True)
        ctypes.string_at(0)
"""


def judge(kq: Client, chosen: list[tuple[Entry, str]], name: str) -> tuple[list[Verdict], float]:
    """Judge a batch. Return the verdicts in order, and the seconds from submission to the last verdict."""
    requests = [entry.request(lane).model_copy(update={"batch": name}) for entry, lane in chosen]
    begun = time.monotonic()
    tickets = kq.submit_batch(requests)
    verdicts = kq.wait_all(tickets, timeout=3600)
    return verdicts, time.monotonic() - begun


def differing(chosen: list[tuple[Entry, str]], verdicts: list[Verdict]) -> list[dict[str, Any]]:
    """Return the unexpected verdicts with details."""
    return [
        {
            "name": entry.name,
            "expected": str(entry.expected),
            "got": str(verdict.category),
            "attempts": verdict.attempts,
            "message": verdict.message[:500],
            "facts": verdict.facts.model_dump(mode="json"),
            "log": verdict.log[-800:],
        }
        for (entry, _), verdict in zip(chosen, verdicts, strict=True)
        if verdict.category is not entry.expected
    ]


def gpu_state() -> dict[str, Any]:
    """Return the first GPU's used memory in bytes, and its processes according to the driver."""
    import pynvml

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return {
            "used_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(handle).used),
            "processes": [process.pid for process in processes],
        }
    finally:
        pynvml.nvmlShutdown()


def candidates_alive(config: Config) -> list[str]:
    """Return pid, name and uid of the running candidates, which have a known name or uid."""
    found: list[str] = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
        except OSError:
            continue
        uid = int(fields["Uid"].split()[0])
        if fields["State"][0] not in "ZX" and (
            fields["Name"] == "kq-candidate" or config.candidate_uid <= uid < config.candidate_uid + 5120
        ):
            found.append(f"{status.parent.name} {fields['Name']} uid {uid}")
    return found


def parents_on_the_gpu(pids: list[int]) -> list[str]:
    """Return the NVIDIA devices that workers or fork servers hold open. There must be none."""
    found: list[str] = []
    for pid in pids:
        family = [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
        for member in family:
            for descriptor in Path(f"/proc/{member}/fd").iterdir():
                if (target := str(descriptor.readlink())).startswith("/dev/nvidia"):
                    found.append(f"{member}: {target}")
    return found


def stages(verdicts: list[Verdict]) -> dict[str, float]:
    names = {name for verdict in verdicts for name in verdict.evidence.durations_s or {}}
    return {
        name: round(statistics.median((v.evidence.durations_s or {}).get(name, 0.0) for v in verdicts), 4)
        for name in sorted(names)
    }


def gaps(url: str) -> dict[str, dict[str, float]]:
    """Return the seconds from an attempt's end to the worker's next attempt, by category of the first."""
    query = text(
        """
        SELECT category, extract(epoch FROM next_start - ended_at) AS gap
        FROM (SELECT category, ended_at,
                     lead(started_at) OVER (PARTITION BY worker_id ORDER BY started_at) AS next_start
              FROM attempts) AS a
        WHERE next_start IS NOT NULL
        """
    )
    found: dict[str, list[float]] = {}
    engine = create_engine(url)
    with engine.connect() as connection:
        for category, gap in connection.execute(query):
            if float(gap) < 5:  # in a longer gap no evaluation was waiting
                found.setdefault(category, []).append(float(gap))
    engine.dispose()
    return {
        category: {
            "count": len(values),
            "median_s": round(statistics.median(values), 4),
            "max_s": round(max(values), 4),
        }
        for category, values in sorted(found.items())
    }


def after_death(kq: Client, good: Entry, times: int) -> dict[str, Any]:
    """Measure the time from a crash, and from a deadline, to the verdict."""
    died: list[float] = []
    for _ in range(times):
        request = good.request("gpu").model_copy(update={"kernel": TELLS_ITS_DEATH})
        verdict = kq.submit(request).wait(timeout=300)
        match = re.search(r"died at ([\d.]+)", verdict.log)
        assert match, (verdict.category, verdict.message, verdict.log)
        died.append(verdict.finished_at.timestamp() - float(match[1]))
    late: list[float] = []
    endless = next(e for e in entries("gpu") if e.name == "bad/endless_loop_triton")
    settings = endless.settings.model_copy(update={"deadlines": Deadlines(check_s=2.0)})
    for _ in range(times):
        request = endless.request("gpu").model_copy(update={"settings": settings})
        verdict = kq.submit(request).wait(timeout=300)
        late.append((verdict.evidence.durations_s or {})["check"] - 2.0)
    return {
        "segfault_to_verdict_s": {"median": round(statistics.median(died), 4), "max": round(max(died), 4)},
        "deadline_to_known_s": {"median": round(statistics.median(late), 4), "max": round(max(late), 4)},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="directory for shown.json and the fleet's logs")
    parser.add_argument("--slots", type=int, help="slots per GPU (the fleet's default)")
    parser.add_argument("--long", type=int, default=300, help="evaluations in the long run (default 300)")
    parser.add_argument("--skip-gallery", action="store_true", help="do not judge the gallery")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="kqueue-shown-"))
    root.chmod(0o711)
    config = load(
        home=root / "home",
        scratch=root / "scratch",
        reuse=False,
        probe_share=0,
        slots_per_gpu=options.slots,
        cpu_slots=0,
    )
    shown: dict[str, Any] = {"before": gpu_state(), "slots_per_gpu": config.slots_per_gpu}
    wrong: list[dict[str, Any]] = []
    everything = {entry.name: entry for entry in entries("gpu")}
    begun = time.monotonic()

    def show(name: str, value: Any) -> None:
        shown[name] = value
        print(f"== {name}: {json.dumps(value, indent=1, default=str)}", flush=True)

    try:
        with LocalFleet(config, durable=False) as fleet, fleet.client() as kq:
            show("start_s", round(time.monotonic() - begun, 2))
            show("idle_fleet", gpu_state())
            if not options.skip_gallery:
                chosen = [(entry, "gpu") for entry in everything.values()]
                verdicts, seconds = judge(kq, chosen, "gallery")
                bad = differing(chosen, verdicts)
                wrong += bad
                show(
                    "gallery",
                    {
                        "evaluations": len(chosen),
                        "as_expected": len(chosen) - len(bad),
                        "seconds": round(seconds, 1),
                        "differing": bad,
                        "categories": Counter(str(v.category) for v in verdicts),
                        "times": {
                            e.name: [v.runtime_ms, v.baseline_ms, v.speedup]
                            for (e, _), v in zip(chosen, verdicts, strict=True)
                            if v.runtime_ms
                        },
                    },
                )
            small = [everything[f"good/triton/{name}"] for name in SMALL]
            choose = random.Random(20)
            faulty = [everything[name] for name in FAULTY]
            count = options.long
            mixed = [(choose.choice(small), "gpu") for _ in range(count - count * 3 // 10)]
            mixed += [(faulty[i % len(faulty)], "gpu") for i in range(count * 3 // 10)]
            choose.shuffle(mixed)
            verdicts, seconds = judge(kq, mixed, "mixed")
            bad = differing(mixed, verdicts)
            wrong += bad
            show(
                "mixed",
                {
                    "evaluations": count,
                    "faulty": count * 3 // 10,
                    "as_expected": count - len(bad),
                    "seconds": round(seconds, 1),
                    "per_s": round(count / seconds, 3),
                    "attempts": Counter(v.attempts for v in verdicts),
                    "differing": bad,
                },
            )
            right = [(small[i % len(small)], "gpu") for i in range(100)]
            verdicts, seconds = judge(kq, right, "right")
            bad = differing(right, verdicts)
            wrong += bad
            show(
                "correct_small_triton",
                {
                    "evaluations": len(right),
                    "as_expected": len(right) - len(bad),
                    "seconds": round(seconds, 1),
                    "per_s": round(len(right) / seconds, 3),
                    "stages_median_s": stages(verdicts),
                },
            )
            latencies: list[float] = []
            idle: list[Verdict] = []
            for _ in range(10):
                at = time.monotonic()
                idle.append(kq.submit(everything["good/triton/softmax"].request("gpu")).wait(timeout=300))
                latencies.append(time.monotonic() - at)
            show(
                "latency_idle_s",
                {
                    "p50": round(statistics.median(latencies), 3),
                    "max": round(max(latencies), 3),
                    "stages_median_s": stages(idle),
                    "isolation": idle[0].evidence.isolation and idle[0].evidence.isolation.model_dump(),
                    "runtime_ms": [v.runtime_ms for v in idle],
                    "one_runtime": idle[0].runtime.model_dump() if idle[0].runtime else None,
                    "one_baseline": idle[0].baseline.model_dump() if idle[0].baseline else None,
                },
            )
            show("after", after_death(kq, everything["good/triton/gelu"], 5))
            show("next_start_after", gaps(fleet.config.require_database()))
            deadline = time.monotonic() + KEPT_S
            while (left := candidates_alive(config)) and time.monotonic() < deadline:
                time.sleep(1.0)
            show("candidates_left", left)
            show("gpu_while_up", gpu_state())
            show("parents_on_the_gpu", parents_on_the_gpu([slot.pid for slot in fleet.slots()]))
        time.sleep(1.0)
        show("gpu_after", gpu_state())
        environment = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False).stdout
        show("nvidia_smi", environment.splitlines()[2:4])
    finally:
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "shown.json").write_text(json.dumps(shown, indent=1, default=str))
            for log in (root / "home" / "logs").glob("*.log"):
                shutil.copy(log, options.out / log.name)
        shutil.rmtree(root, ignore_errors=True)
    anything = (
        shown["candidates_left"]
        or shown["parents_on_the_gpu"]
        or shown["gpu_after"]["used_bytes"] > shown["before"]["used_bytes"] + (64 << 20)
    )
    print(f"{len(wrong)} verdicts differ, leftovers: {bool(anything)}")
    return 1 if wrong or anything else 0


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    sys.exit(main())
