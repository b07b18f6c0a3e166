"""Run autopsies of the gallery's wrong kernels: `python benchmarks/autopsy.py [--lane cpu|gpu] [--only NAME...]`.

A local judge shrinks the inputs of each gallery kernel that is at fault and fails after its import, and then the
resulting `repro.py` runs. The table has the elements of the inputs before and after, the evaluations, the seconds, and
the exit status and last line of `repro.py`. The exit status is 0 if at least 80 % of the kernels shrink to 64 elements
or fewer.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from gallery import entries

from kqueue.cli.render import print_table
from kqueue.features.autopsy import run
from kqueue.features.autopsy.shrink import SHRUNK, Autopsy
from kqueue.judging import LocalJudge

#: Largest number of elements of a small input, and the required share of small inputs.
SMALL, SHARE = 64, 0.8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lane", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for each kernel")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="entries by name, such as bad/nan")
    options = parser.parse_args()
    chosen = [
        entry
        for entry in entries(options.lane)
        if (entry.name in options.only if options.only else entry.expected in SHRUNK)
    ]
    rows: list[tuple[object, ...]] = []
    shrunk = small = 0
    with LocalJudge("cpu" if options.lane == "cpu" else None) as local:
        for entry in chosen:
            began = time.monotonic()
            report = run.by_judge(Autopsy(entry.request(options.lane)), local, options.budget, lambda _: None)
            seconds = time.monotonic() - began
            if report.refusal is not None:
                print(f"{entry.name}: {report.refusal}", flush=True)
                continue
            shrunk += 1
            after = report.elements_after
            small += after is not None and after <= SMALL
            shown = "no repro.py" if report.repro is None else _repro(report.repro)
            rows.append(
                (entry.name, report.category, report.elements_before, after, report.fill, report.evaluations,
                 f"{seconds:.1f}", report.ended, shown)
            )  # fmt: skip
            print(*rows[-1], flush=True)
    columns = ("kernel", "category", "before", "after", "values", "evaluations", "took s", "ended", "repro.py")
    print_table(columns, rows)
    print(f"{small} of {shrunk} ({small / max(shrunk, 1):.0%}) shrink to {SMALL} elements or fewer")
    return 0 if shrunk and small >= SHARE * shrunk else 1


def _repro(source: str) -> str:
    """Run repro.py. Return its exit status and last line."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "repro.py")
        file.write_text(source, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, str(file)], cwd=folder, capture_output=True, text=True, check=False, timeout=300
        )
        lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or [""]
        return f"{done.returncode}: {lines[-1][:70]}"


if __name__ == "__main__":
    sys.exit(main())
