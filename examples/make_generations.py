"""Write the gallery in KernelBench's file layout: `python examples/make_generations.py OUT --lane cpu`.

It writes the problems to OUT/KernelBench/level1/N_name.py, and their kernels in one backend, correct and wrong, to
OUT/run/level_1_problem_P_sample_S_kernel.py. Then run:

    kqueue kernelbench --problems OUT/KernelBench --generations OUT/run --backend torch
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gallery import Entry, entries

from kqueue import Blame, Settings


def chosen(lane: str, backend: str) -> list[Entry]:
    """Return the entries of one backend that use the default settings."""
    return [
        entry
        for entry in entries(lane)
        if entry.backend == backend and entry.settings == Settings() and entry.expected.blame is not Blame.PROBLEM
    ]


def write(out: Path, found: list[Entry]) -> int:
    """Write problems and kernels. Return the number of kernels."""
    problems, run = out / "KernelBench" / "level1", out / "run"
    problems.mkdir(parents=True, exist_ok=True)
    run.mkdir(parents=True, exist_ok=True)
    numbers: dict[Path, int] = {}
    samples: dict[int, int] = {}
    for entry in found:
        number = numbers.setdefault(entry.problem, len(numbers) + 1)
        (problems / f"{number}_{entry.problem.stem}.py").write_text(entry.problem.read_text())
        sample = samples[number] = samples.get(number, -1) + 1
        (run / f"level_1_problem_{number}_sample_{sample}_kernel.py").write_text(entry.kernel.read_text())
    return len(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--lane", choices=["cpu", "gpu"], default="gpu")
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--most", type=int, help="write at most this many kernels")
    options = parser.parse_args()
    made = write(options.out, chosen(options.lane, options.backend)[: options.most])
    print(f"{made} kernels in {options.out / 'run'}")
