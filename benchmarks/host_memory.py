"""Measure the host's memory while a kernel of large tensors is judged on the CPU.

All processes of the judge count, shared memory once. Run ``python benchmarks/host_memory.py``: it judges a clamp of
0.5 GiB in and 0.5 GiB out, and exits with 1 if that takes more than 4 GiB beyond an idle judge. It took 3.2 GiB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROBLEM = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return x.clamp(-0.5, 0.5)
def get_inputs():
    return [torch.rand({mib} << 18)]
"""
#: Maximum memory as a multiple of the size of input and output.
MOST = 4.0
#: Seconds between two looks at the processes.
NAP_S = 0.2


def tree(pid: int) -> list[int]:
    """Return a process and its descendants, as far as they live."""
    found = [pid]
    for one in found:
        try:
            for task in Path(f"/proc/{one}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return found


def held_bytes(pid: int) -> int:
    """Return the memory of a process in bytes, with its share of shared memory, or 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def measure(mib: int, directory: Path) -> tuple[int, int]:
    """Judge a clamp of tensors of ``mib`` MiB. Return the bytes of the idle judge, and the most of all processes."""
    problem, kernel = directory / "problem.py", directory / "kernel.py"
    problem.write_text(PROBLEM.format(mib=mib))
    kernel.write_text(problem.read_text().partition("def get_inputs")[0].replace("Model", "ModelNew"))
    settings = {"checks": 2, "deadlines": {"reference_s": 1000}}
    command = [
        sys.executable,
        "-m",
        "kqueue",
        "judge",
        problem,
        kernel,
        "--device=cpu",
        "--settings",
        json.dumps(settings),
    ]
    judging = subprocess.Popen([*map(str, command), "--json"], stdout=subprocess.PIPE, text=True)
    totals: list[int] = []
    idle = 0
    while judging.poll() is None:
        pids = tree(judging.pid)
        totals.append(sum(map(held_bytes, pids)))
        names = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids if Path(f"/proc/{pid}/comm").exists()}
        if not idle and "kq-candidate" in names:
            idle = totals[-1]
        time.sleep(NAP_S)
    assert judging.stdout is not None
    verdict = json.loads(judging.stdout.read())["verdict"]
    if verdict["category"] != "passed":
        sys.exit(f"the clamp ended as {verdict['category']} at {max(totals)} bytes: {verdict['message']}")
    return idle, max(totals)


def main() -> None:
    """Print the figures, and exit with 1 if the memory is more than its bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512, help="size of input and output each")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        idle, most = measure(arguments.mib, Path(directory))
    ratio = (most - idle) / (arguments.mib << 21)
    found = {"mib": arguments.mib, "idle_bytes": idle, "most_bytes": most, "ratio": ratio}
    print(
        f"{arguments.mib} + {arguments.mib} MiB: {(most - idle) / 2**30:.2f} GiB beyond the idle judge's"
        f" {idle / 2**30:.2f} GiB, {ratio:.2f} times the pair"
    )
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    if ratio > MOST:
        sys.exit(f"more than {MOST:g} times the pair")


if __name__ == "__main__":
    main()
