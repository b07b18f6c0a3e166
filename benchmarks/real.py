"""Judge each problem of a folder against itself: `python benchmarks/real.py FOLDER... --out DIR [--slots N]`.

A problem's own model is submitted as the kernel, under default settings. So every verdict must be `passed`, at the
first attempt, and at the reference's own speed: whatever differs is the judge's doing. A folder may be a KernelBench
checkout or anything else that holds problems of that form. `benchmarks/problems` is one: ten problems with operations
and sizes of KernelBench's level 2, up to 3.2 GiB, and four small ones like those of level 3.

It starts a fleet of its own. Each verdict is kept in `DIR/real.jsonl` as it comes; run again, it judges only what is
not there yet, or has changed. In the end it prints a table of all problems that were asked for, and draws speedups over
times in `DIR/real.svg`. The exit status is 0 only if all passed at their first attempt, and the median speedup of those
that take 0.1 ms or more lies within 0.97 and 1.03.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pygal
from rich.console import Console
from rich.progress import track
from rich.table import Table

from kqueue import Category, Client, Request, Verdict
from kqueue.config import load
from kqueue.errors import InvalidRequest
from kqueue.local.fleet import LocalFleet

#: Shorter times vary with the host by more than the bounds below.
LEAST_MS = 0.1
#: Bounds of the median speedup of a model over itself.
BOUNDS = (0.97, 1.03)

Row = dict[str, Any]


def hash_of(source: str) -> str:
    """Return what a problem is kept under beside its name."""
    return hashlib.sha256(source.encode()).hexdigest()


def problems(folders: Iterable[Path], only: str) -> Iterator[tuple[str, str]]:
    """Give names and sources of the problems below some folders, in their natural order."""
    for folder in folders:
        found = [path for path in folder.rglob("*.py") if re.search(only, str(path.relative_to(folder)))]
        for path in sorted(found, key=lambda p: [int(t) if t.isdigit() else t for t in re.split(r"(\d+)", str(p))]):
            source = path.read_text()
            if "def get_inputs" in source:
                yield str(path.relative_to(folder)), source


def row_of(name: str, source: str, verdict: Verdict | InvalidRequest) -> Row:
    """Return what is kept of a verdict."""
    row: Row = {"problem": name, "hash": hash_of(source)}
    if isinstance(verdict, InvalidRequest):
        return row | {"category": "not accepted", "message": str(verdict)}
    return row | {
        "category": str(verdict.category),
        "message": verdict.message,
        "attempts": verdict.attempts,
        "runtime_ms": verdict.runtime_ms,
        "baseline_ms": verdict.baseline_ms,
        "speedup": verdict.speedup,
        "verified_calls": verdict.evidence.verified_calls,
        "durations_s": verdict.evidence.durations_s,
        "gpu_memory": verdict.evidence.gpu_memory.model_dump() if verdict.evidence.gpu_memory else None,
        "device": verdict.environment.device if verdict.environment else None,
    }


def judge(client: Client, wanted: dict[str, str], lane: str, kept: Path) -> Iterator[Row]:
    """Judge problems against themselves, and give what is kept of each verdict when it comes."""
    entries = [
        Request(
            problem=source, kernel=f"{source}\n\nModelNew = Model\n", backend="torch", lane=lane, problem_label=name
        )
        for name, source in wanted.items()
    ]
    submitted = list(zip(wanted, client.submit_each(entries), strict=True))
    refused = [(name, result) for name, result in submitted if isinstance(result, InvalidRequest)]
    tickets = {
        result.evaluation_id: (name, result) for name, result in submitted if not isinstance(result, InvalidRequest)
    }
    judged = client.as_completed(ticket for _, ticket in tickets.values())
    named = ((tickets[ticket.evaluation_id][0], verdict) for ticket, verdict in judged)
    with kept.open("a") as file:
        for name, result in chain(refused, named):
            row = row_of(name, wanted[name], result)
            file.write(json.dumps(row) + "\n")
            file.flush()
            yield row


def read(kept: Path) -> dict[tuple[str, str], Row]:
    """Return what earlier runs have kept, by name and hash of the problem."""
    lines = kept.read_text().splitlines() if kept.exists() else []
    return {(row["problem"], row["hash"]): row for row in map(json.loads, lines)}


def is_good(row: Row) -> bool:
    """True if a problem passed at its first attempt."""
    return row["category"] == Category.PASSED and row["attempts"] == 1


def table(rows: list[Row]) -> Table:
    """Return the rows for a reader."""
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
    """Draw each problem's speedup over itself, by its time."""
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
    """Judge, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--out", type=Path, required=True, help="the folder for verdicts and picture")
    parser.add_argument("--only", default="", metavar="REGEX", help="problems whose path matches")
    parser.add_argument("--lane", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--slots", type=int, default=4, help="slots of the GPU, or of the host's CPUs")
    options = parser.parse_args()
    wanted = dict(problems(options.folders, options.only))
    if not wanted:
        parser.error("no problem matches: a problem is a Python file that defines get_inputs()")
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / "real.jsonl"
    known = read(kept)
    missing = {name: source for name, source in wanted.items() if (name, hash_of(source)) not in known}
    console = Console()
    if missing:
        with tempfile.TemporaryDirectory(prefix="kqueue-real-") as place:
            root = Path(place)
            root.chmod(0o711)  # candidates have users of their own
            slots = (
                {"slots_per_gpu": options.slots}
                if options.lane == "gpu"
                else {"gpus": "none", "cpu_slots": options.slots}
            )
            config = load(home=root / "home", scratch=root / "scratch", **slots)
            with LocalFleet(config, durable=False) as fleet, fleet.client() as client:
                judged = judge(client, missing, options.lane, kept)
                for _ in track(judged, "judging", total=len(missing), console=console):
                    pass
        known = read(kept)
    rows = [known[name, hash_of(source)] for name, source in wanted.items()]
    console.print(table(rows))
    draw(rows, options.out / "real.svg")
    good = sum(map(is_good, rows))
    console.print(f"{good} of {len(rows)} passed at their first attempt")
    speedups = [row["speedup"] for row in rows if row.get("speedup") and row["baseline_ms"] >= LEAST_MS]
    steady = True
    if speedups:
        median = statistics.median(speedups)
        steady = BOUNDS[0] <= median <= BOUNDS[1]
        console.print(
            f"speedup over itself of the {len(speedups)} that take {LEAST_MS} ms and more:"
            f" median {median:.3f}, from {min(speedups):.3f} to {max(speedups):.3f}"
        )
    return 0 if good == len(rows) and steady else 1


if __name__ == "__main__":
    sys.exit(main())
