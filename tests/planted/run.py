"""Plant each fault of :mod:`faults` in a copy of the code, and run the gate's tests that should find it.

`python tests/planted/run.py [NAME ...]`. With `--write` the result is written to `tests/planted/results.md`. The exit
status is 0 if at least 19 of 20 faults are found.
"""

from __future__ import annotations

import argparse
import itertools
import os
import queue
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
COPIES = ROOT / "dist" / "planted"
RESULTS = Path(__file__).with_name("results.md")
#: Minimum share of faults that must be found.
ENOUGH = 0.95
#: Time limit in seconds for the tests of one fault, many times their usual duration.
LIMIT_S = 600
GATE = "not nightly and not compose"
#: Modification times of changed modules, each a second later, because Python recompiles a module only then.
_times = itertools.count(int(time.time()))


@dataclass(frozen=True)
class Result:
    """Outcome of one fault: the test that found it, or the reason that none did."""

    fault: Fault
    found_by: str | None
    trouble: str
    seconds: float


def main() -> int:
    """Plant the faults that the command line names. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to plant (default: all)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="copies to test at once")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    options = parser.parse_args()
    if unknown := set(options.names) - {fault.name for fault in FAULTS}:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    chosen = [fault for fault in FAULTS if not options.names or fault.name in options.names]
    shutil.rmtree(COPIES, ignore_errors=True)
    copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for number in range(options.jobs):
        copies.put(copied(COPIES / str(number)))

    def plant(fault: Fault) -> Result:
        copy = copies.get()
        try:
            result = planted(copy, fault)
        finally:
            copies.put(copy)
        print(f"{fault.name}: {result.found_by or f'NOT FOUND {result.trouble}'} ({result.seconds:.0f} s)", flush=True)
        return result

    began = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as jobs:
        results = list(jobs.map(plant, chosen))
    found = sum(result.found_by is not None for result in results)
    print(f"{found} of {len(results)} faults found in {time.monotonic() - began:.0f} s")
    if options.write:
        RESULTS.write_text(table(results))
    shutil.rmtree(COPIES)
    return 0 if found >= ENOUGH * len(results) else 1


def copied(target: Path) -> Path:
    """Copy the files that Git knows or would add, with a virtual environment that imports the copy."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    environment = target / ".venv"
    shutil.copytree(VENV, environment, symlinks=True, copy_function=os.link)
    named = [*environment.glob("lib/*/site-packages/*.pth"), *environment.glob("bin/*")]
    for path in (path for path in named if path.is_file() and not path.is_symlink()):
        content = path.read_bytes()
        if os.fsencode(ROOT) in content:
            mode = path.stat().st_mode
            path.unlink()  # a hard link
            path.write_bytes(content.replace(os.fsencode(ROOT), os.fsencode(target)))
            path.chmod(mode)
    return target


def planted(copy: Path, fault: Fault) -> Result:
    """Change a copy, run the fault's tests until one fails, and change the copy back."""
    file = copy / fault.path
    content = file.read_text()
    if content.count(fault.before) != 1:
        return Result(fault, None, f"{fault.path} does not have the text to change once", 0.0)
    write(file, content.replace(fault.before, fault.after))
    began = time.monotonic()
    try:
        status, output = tested(copy, fault.tests)
    finally:
        write(file, content)
    seconds = time.monotonic() - began
    failed = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", output, re.M)
    if status == 1 and failed:
        return Result(fault, failed[1], "", seconds)
    return Result(fault, None, f"(status {status}) {output[-300:]}" if status else "", seconds)


def tested(copy: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run tests up to the first failure. Return pytest's exit status, 1 if they hang, and its output."""
    command = [".venv/bin/python", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", GATE, *tests]
    try:
        done = subprocess.run(
            command, cwd=copy, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return 1, f"FAILED {tests[0]} (no end within {LIMIT_S} s)"
    return done.returncode, done.stdout


def write(file: Path, content: str) -> None:
    """Write a module so that no compiled form of its former content is used."""
    file.write_text(content)
    moment = next(_times)
    os.utime(file, (moment, moment))


def table(results: Sequence[Result]) -> str:
    """Return the results as a page."""
    found = sum(result.found_by is not None for result in results)
    rows = [
        f"| {r.fault.name} | {r.fault.promise} | {r.found_by or '**not found**'} | {r.seconds:.0f} |" for r in results
    ]
    head = (
        "# Planted faults\n\n"
        f"`make planted ARGS=--write` wrote this page: the gate found {found} of {len(results)} faults.\n\n"
        "| fault | promise that it breaks | found by | seconds |\n|---|---|---|---|\n"
    )
    return head + "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
