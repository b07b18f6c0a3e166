"""Writes `docs/integrity.md` and two pictures from the committed results: `python tests/integrity/report.py`."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kqueue.categories import Category
from kqueue.charts import Bar, Categories, Chart, Leaderboard, Stack, render
from tests.integrity.corpus import HERE, Judgement, Program, programs

RESULTS: Final = HERE / "results"
REPORT: Final = HERE.parents[1] / "docs" / "integrity.md"
LANES: Final = ("gpu", "cpu")
#: The attacked parts of kqueue, by folder of the corpus.
_FOLDERS: Final = {"timing": "the clock", "values": "the comparison", "processes": "processes and files"}
#: The median of a measurement, and its quartiles, the slower one first.
_OF: Final = ("median_ms", "q3_ms", "q1_ms")
_HEAD: Final = """\
# Integrity

`python tests/integrity/report.py` generates this page from `tests/integrity/` and its committed results.

Each program is one known way in which a kernel can look faster or more correct than it is. Its docstring explains the
cheat, why it works with an evaluator that compares and times inside the kernel's own process, and why it fails here.

*Stopped* means any category except `passed`. Some cheats are allowed to pass, but only with an honest time: the cheat's
median time over an honest kernel's for the same problem, both with exclusive access to the device. Controls are honest
kernels that look suspicious. One that does not pass, or whose time changes, counts as a failure. An outcome without a
lane is the outcome of both, and a control without an outcome passed.

Run it again with `make integrity ARGS='--lane gpu --out tests/integrity/results/gpu.json'` (or `--lane cpu`).
"""
_COSTS: Final = """
## Costs of the rules

- Each hidden input: one draw, up to two calls in float64, and one call of the kernel
- State: copies of up to 1 GiB, restored before each call outside the time
- Random values for gates and state: two calls of the reference and one of the kernel
- Verified timed calls: 2 to 8 calls of the reference
- Work between calls on a CPU: two readings of its clock a call, 0.3 us together
"""


def results(lane: str) -> dict[str, Any]:
    """Return the committed results of a lane, or an empty object."""
    file = RESULTS / f"{lane}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def report() -> str:
    """Return the document."""
    found = {lane: results(lane) for lane in LANES}
    everything = programs()
    lines = [_HEAD, "## Summary", "", *_summary(everything, found)]
    lines += [f"\n{lane.upper()}: {found[lane]['note']}" for lane in LANES if "note" in found[lane]]
    lines += ["", "## Known not to be caught", ""]
    holes: dict[str, list[str]] = {}
    for program in everything:
        holes.setdefault(program.hole, []).append(f"`{program.name}` ({program.family})")
    lines += [f"- {', '.join(names)}: {hole}" for hole, names in holes.items() if hole]
    lines += [_COSTS, "## Programs"]
    for title, chosen in _sections(everything):
        lines += ["", f"**{title[:1].upper()}{title[1:]}**", ""]
        by_mechanism = groupby(chosen, lambda program: program.mechanism.partition("\n")[0])
        lines += [_line(first, list(alike), found) for first, alike in by_mechanism]
    return "\n".join(lines) + "\n"


def pictures() -> dict[str, Chart]:
    """Return the charts of the GPU's results by the names of their files."""
    rows = results("gpu")["programs"]
    ran = [(program, rows[program.name]) for program in programs("gpu") if program.name in rows]
    cheats = [(program, row) for program, row in ran if not program.is_control]
    bars = [
        Bar(program.name.partition("/")[2].replace("_", " "), *(one["honest_ms"] / one["runtime"][of] for of in _OF))
        for program, row in cheats
        if (one := row.get("alone")) and program.name.startswith("timing/")
    ]
    folders = {folder: [row for program, row in cheats if program.name.startswith(folder)] for folder in _FOLDERS}
    stacks = [Stack(_FOLDERS[name], Counter(Category(row["category"]) for row in of)) for name, of in folders.items()]
    bars.sort(key=lambda bar: -bar.speedup)
    return {
        "clock.svg": Leaderboard("Cheats of the clock that passed, beside an honest kernel", bars),
        "outcomes.svg": Categories("What cheats came to", stacks),
    }


def digest(chart: Chart) -> str:
    """Return a comment that changes with a chart's data, because libraries' versions change the picture's bytes."""
    return f"<!-- data: {hashlib.sha256(repr(chart).encode()).hexdigest()} -->"


def _sections(everything: list[Program]) -> list[tuple[str, list[Program]]]:
    families = dict.fromkeys(program.family for program in everything if not program.is_control)
    by_family = [(family, [program for program in everything if program.family == family]) for family in families]
    return [*by_family, ("controls", [program for program in everything if program.is_control])]


def _summary(everything: list[Program], found: dict[str, dict[str, Any]]) -> list[str]:
    cheats = [program for program in everything if not program.is_control]
    families, controls = len({program.family for program in cheats}), len(everything) - len(cheats)
    columns = {lane: _figures(everything, found[lane]) for lane in LANES}
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    are_for = {lane: sum(lane in program.lanes for program in everything) for lane in LANES}
    lines = [
        f"{len(cheats)} cheats of {families} families and {controls} controls: {len(everything)} programs.",
        f"{are_for['gpu']} of them are for a GPU, and {are_for['cpu']} for a CPU. A lane judges only its own programs.",
        "",
    ]
    lines += ["| | " + " | ".join(lane.upper() for lane in LANES) + " |", "|---" * (1 + len(LANES)) + "|"]
    return lines + [f"| {name} | " + " | ".join(columns[lane].get(name, "") for lane in LANES) + " |" for name in names]


def _figures(everything: list[Program], result: dict[str, Any]) -> dict[str, str]:
    """Return the figures of a lane's summary by the name of their line."""
    if not result:
        return {"date": "not run"}
    rows = result["programs"]
    judged = [(program, rows[program.name]) for program in everything if program.name in rows]
    counts = Counter(_kind(program, row) for program, row in judged)
    environment = result.get("environment") or {}
    return {
        "date": result["date"],
        "device": str(environment.get("device")),
        "torch, triton": f"{environment.get('torch')}, {environment.get('triton')}",
        "isolation": str((result.get("isolation") or {}).get("level") or "-"),
        "judged": str(len(judged)),
        "as expected": str(sum(Judgement(row["judgement"]).good for _, row in judged)),
        "cheats stopped": str(counts["stopped"]),
        "cheats passed with an honest time": str(counts["honest"]),
        "controls passed": str(counts["control"]),
        "known holes": str(counts["hole"]),
        "not as expected": str(counts["bad"]),
    }


def _kind(program: Program, row: dict[str, Any]) -> str:
    if row["judgement"] != Judgement.OK:
        return "hole" if Judgement(row["judgement"]).good else "bad"
    if program.is_control:
        return "control"
    return "honest" if row["category"] == "passed" else "stopped"


def _line(first: str, alike: list[Program], found: dict[str, dict[str, Any]]) -> str:
    """Return the line of programs with one mechanism. A note that only repeats a program's name is left out."""
    names: dict[str, list[str]] = {}
    for program in alike:
        names.setdefault(_outcomes(program, found), []).append(f"`{program.name}`")
    noted = [program for program in alike if not re.fullmatch(r"Here: \w+\.|", program.note)]
    notes = [f"`{program.name}`: {program.note}" if len(alike) > 1 else program.note for program in noted]
    shown = ", ".join(", ".join(those) + (outcomes and f" ({outcomes})") for outcomes, those in names.items())
    return f"- {shown}: {' '.join([first.removeprefix('Honest: '), *notes])}"


def _outcomes(program: Program, found: dict[str, dict[str, Any]]) -> str:
    cells = [_cell(program, lane, found[lane]) for lane in LANES]
    outcomes = [f"{lane.upper()} {cell}".strip() for lane, cell in zip(LANES, cells, strict=True) if cell is not None]
    outcomes = [cell for cell in cells[:1] if cell] if cells[0] == cells[1] else outcomes
    ratio = found["gpu"].get("programs", {}).get(program.name, {}).get("alone", {}).get("ratio")
    return ", ".join(outcomes + ([] if ratio is None else [f"time {ratio:.2f}"]))


def _cell(program: Program, lane: str, result: dict[str, Any]) -> str | None:
    """Return the outcome on a lane, empty for a control that passed, and None for a program of other lanes."""
    row = result.get("programs", {}).get(program.name)
    if row is None or lane not in program.lanes:
        return "not run" if lane in program.lanes else None
    cell = "" if program.is_control and row["category"] == "passed" else f"`{row['category']}`"
    if row["category"] == "passed" and row["runtime"] is not None and row["runtime"]["basis"] != "gpu_clock":
        cell += " (CPU clock)" if lane == "gpu" else ""
    return (cell if row["judgement"] == Judgement.OK else f"{cell} **{row['judgement']}**").strip()


if __name__ == "__main__":
    REPORT.write_text(report(), encoding="utf-8")
    for name, chart in pictures().items():
        (RESULTS / name).write_text(f"{render(chart).decode()}{digest(chart)}\n", encoding="utf-8")
    print(f"wrote {REPORT}")
