"""Judge each problem of a folder against itself: `python benchmarks/real.py FOLDER... --out DIR [--slots N]`.

Each problem's model is submitted as the kernel, with default settings. So every verdict must be `passed` at the first
attempt, with a speedup of 1. Any difference is an error of the judge. A folder can be a KernelBench checkout or any
folder of problems in this form. `benchmarks/problems` has ten problems with operations and sizes of KernelBench's level
2, up to 3.2 GiB, and four small ones in the style of level 3.

It starts a fleet. Each verdict is appended to `DIR/real.jsonl` when it arrives. A further run judges only new and
changed problems. At the end it prints a table of all selected problems, and draws speedups over times in
`DIR/real.svg`. The exit status is 0 only if all passed at their first attempt, and the median speedup of the problems
of 0.1 ms or more lies between 0.97 and 1.03.

With `--rounds N` each new problem is judged N times. From the second round on baselines are known. For each round it
reports the evaluations per second, and the GPU utilisation from NVML.

With `--mixed` the order is random. One small kernel of the gallery is judged for each problem, and among every ten
evaluations is a kernel that takes all of the GPU's memory. All of these must get the gallery's expected categories.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import random
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import pygal
import pynvml
from gallery import Entry
from gallery import entries as gallery
from rich.console import Console
from rich.progress import track
from rich.table import Table

from kqueue import Category, Client, Request, Verdict
from kqueue.config import load
from kqueue.errors import InvalidRequest
from kqueue.local.fleet import LocalFleet

#: Additional kernels of `--mixed` by lane: right kernels of this backend, and one that takes all memory.
SMALL = {"gpu": "triton", "cpu": "torch"}
BOMB = {"gpu": "bad/gpu_memory_bomb", "cpu": "bad/host_memory_bomb"}
#: Shortest reference time in milliseconds for the bounds below. Shorter times vary more with the host.
LEAST_MS = 0.1
#: Bounds of the median speedup of a model over itself.
BOUNDS = (0.97, 1.03)

#: Seconds between two samples of the GPU utilisation, which NVML measures over a sixth of a second.
LOOK_S = 0.2

Row = dict[str, Any]


@contextmanager
def watched() -> Generator[list[float]]:
    """Yield a list that collects the GPU utilisation (0 to 1) during the block. Without NVML it remains empty."""
    seen: list[float] = []
    over = threading.Event()

    def look() -> None:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            while handles and not over.wait(LOOK_S):
                seen.append(statistics.fmean(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100 for gpu in handles))

    looker = threading.Thread(target=look)
    looker.start()
    try:
        yield seen
    finally:
        over.set()
        looker.join()


def hash_of(source: str) -> str:
    """Return the hash that identifies a version of a problem."""
    return hashlib.sha256(source.encode()).hexdigest()


def problems(folders: Iterable[Path], only: str) -> Iterator[tuple[str, str]]:
    """Yield names and sources of the problems in these folders, in natural order."""
    for folder in folders:
        found = [path for path in folder.rglob("*.py") if re.search(only, str(path.relative_to(folder)))]
        for path in sorted(found, key=lambda p: [int(t) if t.isdigit() else t for t in re.split(r"(\d+)", str(p))]):
            source = path.read_text()
            if "def get_inputs" in source:
                yield str(path.relative_to(folder)), source


def row_of(name: str, source: str, verdict: Verdict | InvalidRequest) -> Row:
    """Return the row of a verdict in `real.jsonl`."""
    row: Row = {"problem": name, "hash": hash_of(source)}
    if isinstance(verdict, InvalidRequest):
        return row | {"category": "not accepted", "message": str(verdict)}
    return row | {
        "category": str(verdict.category),
        "message": verdict.message,
        "attempts": verdict.attempts,
        "runtime": verdict.runtime.model_dump(mode="json") if verdict.runtime else None,
        "baseline": verdict.baseline.model_dump(mode="json") if verdict.baseline else None,
        "runtime_ms": verdict.runtime_ms,
        "baseline_ms": verdict.baseline_ms,
        "speedup": verdict.speedup,
        "verified_calls": verdict.evidence.verified_calls,
        "durations_s": verdict.evidence.durations_s,
        "gpu_memory": verdict.evidence.gpu_memory.model_dump() if verdict.evidence.gpu_memory else None,
        "device": verdict.environment.device if verdict.environment else None,
    }


def gallery_kernels(lane: str, count: int) -> list[Entry]:
    """Return ``count`` small right kernels, and memory bombs for a tenth of all evaluations of `--mixed`."""
    small = [entry for entry in gallery(lane) if entry.expected is Category.PASSED and entry.backend == SMALL[lane]]
    bomb = next(entry for entry in gallery(lane) if entry.name == BOMB[lane])
    right = list(itertools.islice(itertools.cycle(small), count))
    return right + [bomb] * math.ceil(2 * count / 9)


def judge(client: Client, wanted: dict[str, str], lane: str, extra: list[Entry], kept: Path) -> Iterator[Row]:
    """Judge problems against themselves, together with kernels of the gallery.

    Yields:
        The row of each problem when its verdict arrives, and the rows of gallery kernels with unexpected categories.
    """
    asked: list[tuple[str | Entry, Request]] = [
        (
            name,
            Request(
                problem=source, kernel=f"{source}\n\nModelNew = Model\n", backend="torch", lane=lane, problem_label=name
            ),
        )
        for name, source in wanted.items()
    ]
    if extra:
        asked += [(entry, entry.request(lane)) for entry in extra]
        random.shuffle(asked)
    results = client.submit_each([request for _, request in asked])
    submitted = [(what, result) for (what, _), result in zip(asked, results, strict=True)]
    refused = [(what, result) for what, result in submitted if isinstance(result, InvalidRequest)]
    tickets = {
        result.evaluation_id: (what, result) for what, result in submitted if not isinstance(result, InvalidRequest)
    }
    judged = client.as_completed(ticket for _, ticket in tickets.values())
    named = ((tickets[ticket.evaluation_id][0], verdict) for ticket, verdict in judged)
    with kept.open("a") as file:
        for what, result in itertools.chain(refused, named):
            if isinstance(what, str):
                row = row_of(what, wanted[what], result)
                file.write(json.dumps(row) + "\n")
                file.flush()
                yield row
            elif isinstance(result, InvalidRequest) or result.category is not what.expected:
                yield row_of(what.name, "", result)


def read(kept: Path) -> dict[tuple[str, str], Row]:
    """Return the rows of earlier runs by name and hash of the problem."""
    lines = kept.read_text().splitlines() if kept.exists() else []
    return {(row["problem"], row["hash"]): row for row in map(json.loads, lines)}


def is_good(row: Row) -> bool:
    """Return whether a problem passed at its first attempt."""
    return row["category"] == Category.PASSED and row["attempts"] == 1


def table(rows: list[Row]) -> Table:
    shown = Table("problem", "category", "tries", "ms", "reference ms", "speedup", "prepared in", "message")
    for row in rows:
        figures = [row.get("runtime_ms"), row.get("baseline_ms"), row.get("speedup")]
        figures.append((row.get("durations_s") or {}).get("reference"))
        cells = ["" if figure is None else f"{figure:.3f}" for figure in figures]
        message = "" if is_good(row) else row["message"][:100]
        style = "" if is_good(row) else "red"
        shown.add_row(row["problem"], row["category"], str(row.get("attempts", "")), *cells, message, style=style)
    return shown


def draw(rows: list[Row], to: Path) -> None:
    """Draw each problem's speedup over itself against its time."""
    chart = pygal.XY(
        stroke=False,
        title="Problems judged against themselves",
        x_title="the reference's time, powers of ten of a millisecond",
        y_title="speedup",
    )
    for category in sorted({row["category"] for row in rows if row.get("speedup")}):
        chart.add(
            category,
            [
                {"value": (math.log10(row["baseline_ms"]), row["speedup"]), "label": row["problem"]}
                for row in rows
                if row["category"] == category and row.get("speedup")
            ],
        )
    chart.render_to_file(str(to))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--out", type=Path, required=True, help="the folder for verdicts and picture")
    parser.add_argument("--only", default="", metavar="REGEX", help="problems whose path matches")
    parser.add_argument("--lane", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--slots", type=int, default=4, help="slots of the GPU, or of the host's CPUs")
    parser.add_argument("--rounds", type=int, default=1, help="evaluations of each problem")
    parser.add_argument(
        "--mixed", action="store_true", help="judge them among small kernels and memory bombs, in random order"
    )
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    wanted = dict(problems(options.folders, options.only))
    if not wanted:
        parser.error("no problem matches: a problem is a Python file that defines get_inputs()")
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / "real.jsonl"
    known = read(kept)
    missing = {name: source for name, source in wanted.items() if (name, hash_of(source)) not in known}
    console = Console()
    surprising: list[Row] = []
    if missing:
        with tempfile.TemporaryDirectory(prefix="kqueue-real-") as folder:
            root = Path(folder)
            root.chmod(0o711)  # candidates with other uids must reach their scratch directories
            slots = (
                {"slots_per_gpu": options.slots}
                if options.lane == "gpu"
                else {"gpus": "none", "cpu_slots": options.slots}
            )
            config = load(home=root / "home", scratch=root / "scratch", reuse=False, probe_share=0, **slots)
            with LocalFleet(config, durable=False) as fleet, fleet.client() as client:
                extra = gallery_kernels(options.lane, len(missing)) if options.mixed else []
                for number in range(1, options.rounds + 1):
                    begun = time.monotonic()
                    judged = judge(client, missing, options.lane, extra, kept)
                    with watched() as busy:
                        ended = list(track(judged, f"round {number}", total=len(missing), console=console))
                    took = time.monotonic() - begun
                    count = len(missing) + len(extra)
                    console.print(
                        f"round {number}: {count} evaluations in {took:.1f} s, {count / took:.2f} a second"
                        + (f", GPUs busy for {statistics.fmean(busy):.0%}" if busy else ""),
                        soft_wrap=True,
                    )
                    unexpected = [row for row in ended if row["problem"] not in missing]
                    if extra:
                        good = len(extra) - len(unexpected)
                        console.print(f"{good} of {len(extra)} kernels of the gallery as expected")
                    surprising += unexpected
                    if number < options.rounds:  # the table has the last round
                        surprising += [row for row in ended if row["problem"] in missing and not is_good(row)]
        known = read(kept)
    rows = [known[name, hash_of(source)] for name, source in wanted.items()]
    console.print(table(rows + surprising))
    draw(rows, options.out / "real.svg")
    good = sum(map(is_good, rows))
    console.print(f"{good} of {len(rows)} passed at their first attempt")
    speedups = [row["speedup"] for row in rows if row.get("speedup") and row["baseline_ms"] >= LEAST_MS]
    steady = True
    if speedups:
        median = statistics.median(speedups)
        steady = BOUNDS[0] <= median <= BOUNDS[1]
        console.print(
            f"speedup over itself of the {len(speedups)} problems of {LEAST_MS} ms or more:"
            f" median {median:.3f}, from {min(speedups):.3f} to {max(speedups):.3f}"
        )
    return 0 if good == len(rows) and steady and not surprising else 1


if __name__ == "__main__":
    sys.exit(main())
