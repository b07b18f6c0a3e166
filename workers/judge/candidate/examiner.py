"""The harness of an examination: run a kernel and its problem under a tool, and parse the tool's output.

All of it runs in one sealed process and its children, where foreign code also runs. So the result is not trusted. It is
converted to JSON here, because the judge reads no file of a sealed process.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from kqueue.program import PYTHON
from workers.judge.candidate import examined
from workers.judge.candidate.harness import Harness
from workers.judge.channel import reports
from workers.judge.channel.orders import Examine, Order
from workers.judge.channel.protocol import Reply
from workers.judge.channel.wire import Command

_LOG: Final = "tool.log"
#: Base name of Nsight Compute's report, and its file.
_COUNTED: Final = "counted"
_COUNTED_FILE: Final = "counted.ncu-rep"
#: Interval in seconds at which the harness checks whether the program is ready.
_LOOK_S: Final = 0.01
#: Time limit in seconds for the export of one table from the report.
_READ_S: Final = 10.0
#: Maximum size in bytes of a log or a table. The rest is ignored.
_LOG_BYTES: Final = 8 << 20
#: Maximum number of errors that compute-sanitizer prints.
_MOST_ERRORS: Final = 2000
#: Maximum number of launches that Nsight Compute profiles. Each is replayed about 20 times.
_MOST_LAUNCHES: Final = 200
#: Sections of Nsight Compute's report. The tool selects the counters that each GPU needs for them.
_SECTIONS: Final = (
    *("LaunchStats", "Occupancy", "SpeedOfLight", "SpeedOfLight_RooflineChart"),
    *("MemoryWorkloadAnalysis", "WarpStateStats", "InstructionStats", "ComputeWorkloadAnalysis", "SourceCounters"),
)
#: Number of kernels that are reported with source lines, and number of lines of each.
_KERNELS_WITH_LINES: Final = 3
_LINES: Final = 5


class Examiner(Harness):
    """One run under a tool. The harness itself uses no device."""

    def __init__(self, page: memoryview[int], directory: Path | None = None) -> None:
        super().__init__(page, directory)
        self.orders = {Order.EXAMINE: self._start, Order.FINISH: self._finish, Order.REPORT: self._report}

    @property
    def on_gpu(self) -> bool:
        """Return False: only the program below the tool opens the device."""
        return False

    def _start(self, command: Command) -> Reply:
        self._asked: Examine = command.payload
        until = time.monotonic() + self._asked.seconds
        Path(examined.PROBLEM).write_text(self._asked.problem, encoding="utf-8")
        Path(examined.JOB).write_text(examined.task_to(self._asked), encoding="utf-8")
        self._tool = _start(self._asked)
        while not Path(examined.READY).exists() and self._tool.poll() is None and time.monotonic() < until:
            time.sleep(_LOOK_S)
        self._left_s = until - time.monotonic()  # waiting for the device does not count
        return self.done(command)

    def _finish(self, command: Command) -> Reply:
        Path(examined.GO).touch()
        self._status = None
        with contextlib.suppress(subprocess.TimeoutExpired):  # the output so far counts
            self._status = self._tool.wait(max(self._left_s, 0.0))
        return self.done(command)

    def _report(self, command: Command) -> Reply:
        [memory] = command.descriptors
        report = _profiled(self._asked.program) if self._asked.tool == "ncu" else findings(_log())
        if self._status is None:
            report["error"] = f"it did not end within {self._asked.seconds:.0f} s"
        elif self._status and not (report.get("findings") or report.get("error")):  # a finding can cause that status
            report["error"] = f"the kernel under the tool ended with status {self._status}"
        reports.write(memory, json.dumps(report))
        return self.done(command)


def _start(asked: Examine) -> subprocess.Popen[bytes]:
    """Start the tool, which starts the program."""
    tool = [
        *(asked.program, "--log-file", _LOG, "--target-processes", "application-only"),
        *(_PROFILER if asked.tool == "ncu" else _SANITIZER),
        *([] if asked.tool == "ncu" else ["--tool", asked.tool]),
    ]
    # Each tensor gets a separate allocation. Otherwise an access beyond a tensor would hit another tensor unnoticed.
    own = {} if asked.tool == "ncu" else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    environment = {**os.environ, **own, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    program = (*PYTHON, "workers.judge.candidate.examined", asked.tool)
    return subprocess.Popen([*tool, *program], stdin=subprocess.DEVNULL, env=environment)


_SANITIZER: Final = (
    *("--print-limit", str(_MOST_ERRORS), "--show-backtrace", "device", "--num-callers-device", "4"),
    *("--require-cuda-init", "no", "--strip-paths", "yes"),
)
_PROFILER: Final = (
    *("--export", _COUNTED, "--force-overwrite", "--profile-from-start", "off"),
    # The clocks stay as they are, because the GPU's owner controls its settings.
    *("--clock-control", "none", "--launch-count", str(_MOST_LAUNCHES)),
    *(word for section in _SECTIONS for word in ("--section", section)),
)


def _log() -> str:
    try:
        with Path(_LOG).open("rb") as stream:
            return stream.read(_LOG_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


# compute-sanitizer -------------------------------------------------------------------------------------

_PREFIX: Final = re.compile(r"^=========( ?)(.*)$")
_AT: Final = re.compile(
    r"\bat (?:0x[0-9a-f]+ in )?(?P<kernel>.+?)(?:\+0x[0-9a-f]+)?(?: in (?P<file>[^\s:]+):(?P<line>\d+))?$"
)
_THREAD: Final = re.compile(r"\bthreads? \((\d+),(\d+),(\d+)\)(?:.*? in block \((\d+),(\d+),(\d+)\))?")
_ADDRESS: Final = re.compile(r"\b(?:Access (?:to|at)|Address) (0x[0-9a-f]+)")
_NEAREST: Final = re.compile(
    r"is (?:([\d,]+) bytes (before|after)|inside) .*allocation at 0x[0-9a-f]+ of size ([\d,]+) bytes"
)
_SIZE: Final = re.compile(r"\bof size (\d+) bytes")
_SUMMARY: Final = re.compile(r"^(?:ERROR SUMMARY: ([\d,]+) errors?|RACECHECK SUMMARY: ([\d,]+) hazards? displayed)")
#: Prefix of an error of the CUDA runtime, which follows from another finding if there is one.
_FOLLOWS: Final = "Program hit "


def findings(log: str) -> dict[str, Any]:
    """Parse a log of compute-sanitizer.

    Returns:
        ``errors``: number of errors, or None. ``findings``: one entry for each location in the code, with the details
        of its first error. ``error``: reason why the program could not be examined, if the log has one.
    """
    errors: int | None = None
    error = ""
    by_location: dict[tuple[Any, ...], dict[str, Any]] = {}
    for title, details in _blocks(log):
        if match := _SUMMARY.match(title):
            errors = int((match[1] or match[2]).replace(",", "")) if errors is None else errors
        elif details or _AT.search(title) or title.startswith(_FOLLOWS):
            one = _finding(title, details)
            key = one["kind"], one["kernel"], one["file"], one["line"]
            by_location.setdefault(key, one)["count"] += 1
        elif "terminated before first instrumented" in title:
            error = title
    first = [one for one in by_location.values() if not one["kind"].startswith(_FOLLOWS)]
    return {"errors": errors, "findings": first or list(by_location.values()), "error": error}


def _blocks(log: str) -> Iterable[tuple[str, list[str]]]:
    """Yield the blocks of a log: the first line of each, and the indented lines below it."""
    title, details = "", list[str]()
    for line in log.splitlines():
        match = _PREFIX.match(line)
        text = match[2].rstrip() if match else ""
        if text.startswith(" "):
            details.append(text.strip())
            continue
        if title:
            yield title, details
        title, details = text, []
    if title:
        yield title, details


def _finding(title: str, details: list[str]) -> dict[str, Any]:
    one: dict[str, Any] = dict.fromkeys(
        ("kernel", "file", "line", "thread", "block", "address", "size_bytes", "allocation_bytes", "distance_bytes")
    )
    kind = title
    for text in (title, *details):
        if one["kernel"] is None and (match := _AT.search(text)):
            kind = title[: match.start()].rstrip() if text is title else kind
            line = match["line"]
            one |= {"kernel": match["kernel"], "file": match["file"], "line": int(line) if line else None}
        if one["thread"] is None and (match := _THREAD.search(text)):
            numbers = [int(number) for number in match.groups() if number is not None]
            one |= {"thread": numbers[:3], "block": numbers[3:] or None}
        if one["address"] is None and (match := _ADDRESS.search(text)):
            one["address"] = match[1]
        if one["allocation_bytes"] is None and (match := _NEAREST.search(text)):
            distance = int((match[1] or "0").replace(",", "")) * (-1 if match[2] == "before" else 1)
            one |= {"allocation_bytes": int(match[3].replace(",", "")), "distance_bytes": distance}
    if match := _SIZE.search(title):
        one["size_bytes"] = int(match[1])
    return one | {"kind": kind, "detail": "; ".join(details), "count": 0}


# Nsight Compute ----------------------------------------------------------------------------------------

_STALL: Final = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
#: Stall reasons without a wait: the warp issued, or could have issued.
_AT_WORK: Final = frozenset({"selected", "not_selected"})
#: Resources that limit the blocks on a multiprocessor, by the suffix of the counter's name.
_LIMITS: Final = {"registers": "registers", "shared_mem": "shared memory", "warps": "warps", "blocks": "blocks"}
_DENIED: Final = "ERR_NVGPUCTRPERM"
#: Column of the source page with the number of warp samples.
_SAMPLES: Final = "# Samples"
#: Key of a launch's position among all launches.
_PLACE: Final = "place"
#: Maximum number of characters of a reported source line.
_TEXT: Final = 200


def _profiled(program: str) -> dict[str, Any]:
    """Return Nsight Compute's results, with source lines of the longest kernels."""
    report = profile(_log(), _table(program, "--page", "raw", "--print-units", "base"))
    for rank, kernel in enumerate(report["kernels"]):
        longest = ("--launch-skip", str(kernel.pop(_PLACE)), "--launch-count", "1")
        if rank < _KERNELS_WITH_LINES:
            table = _table(program, "--page", "source", "--print-source", "cuda,sass", *longest)
            kernel["lines"] = lines(table, kernel["name"])
    return report


def _table(program: str, *options: str) -> str:
    """Export a table of the report as CSV, cut at the limits of time and size."""
    command = [program, "--import", _COUNTED_FILE, "--csv", *options]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as reading:
        late = threading.Timer(_READ_S, reading.kill)
        late.start()
        assert reading.stdout is not None
        try:
            return reading.stdout.read(_LOG_BYTES).decode("utf-8", "replace")
        finally:
            late.cancel()
            reading.kill()


def profile(log: str, table: str) -> dict[str, Any]:
    """Parse Nsight Compute's output.

    Args:
        table: raw counters as CSV, in base units.

    Returns:
        ``kernels``: the longest first, each with the ``place`` of its longest launch among all launches. ``peak_gbs``
        and ``peak_gflops``: peaks of the GPU. ``error``: reason why there are no results.
    """
    messages = log.splitlines()
    if any(_DENIED in line for line in messages):
        return {"kernels": [], "error": "this user is not allowed to read the GPU's counters (ERR_NVGPUCTRPERM)"}
    rows = list(csv.reader(line for line in table.splitlines() if line.startswith('"')))
    if len(rows) < 3:
        errors = [line.removeprefix("==ERROR== ") for line in messages if line.startswith("==ERROR==")]
        return {"kernels": [], "error": errors[0] if errors else "the call launched no kernel"}
    launches = [dict(zip(rows[0], row, strict=False)) | {_PLACE: str(place)} for place, row in enumerate(rows[2:])]
    by_name: dict[str, list[Mapping[str, str]]] = {}
    for launch in launches:
        by_name.setdefault(launch["Kernel Name"], []).append(launch)
    kernels = [_kernel(name, each) for name, each in by_name.items()]
    longest = max(launches, key=lambda launch: _number(launch, "gpu__time_duration.sum") or 0)
    return {
        "kernels": sorted(kernels, key=lambda kernel: -kernel["duration_ms"]),
        "peak_gbs": _product(longest, "dram__bytes.sum.peak_sustained", "dram__cycles_elapsed.avg.per_second"),
        "peak_gflops": _product(
            longest,
            "sm__sass_thread_inst_executed_op_ffma_pred_on.sum.peak_sustained",
            "sm__cycles_elapsed.avg.per_second",
            2,
        ),
        "error": "",
    }


def lines(table: str, kernel: str) -> list[dict[str, Any]]:
    """Return the lines of a kernel's sources with the most warp samples, from Nsight Compute's source page.

    The CSV has a part for each source file and kernel, which lists the file's lines and their instructions. The first
    lines are returned, with the fields of :class:`~kqueue.evidence.SourceLine`.
    """
    seen: Counter[tuple[str, int]] = Counter()
    path, is_kernel, after = "", False, 0
    for row in csv.reader(line for line in table.splitlines() if line.startswith('"')):
        if row[0] == "File Path":
            path = row[-1]
        elif row[0] == "Function Name":
            is_kernel = row[-1] == kernel
        elif row[0] == "Line No":
            # Quotes in a source are not escaped, which can shift later columns. So columns are counted from the end.
            after = len(row) - row.index(_SAMPLES) if _SAMPLES in row else 0
        elif is_kernel and after and len(row) > after and row[0].isdecimal() and row[-after].isdecimal():
            seen[path, int(row[0])] += int(row[-after])
    total = seen.total()
    return [
        {"file": Path(path).name, "line": number, "share": count / total, "text": _line(Path(path), number)}
        for (path, number), count in seen.most_common(_LINES)
        if count
    ]


def _line(path: Path, number: int) -> str | None:
    """Return a line of a source, or None if the file is gone."""
    # A builder's folder is gone, but torch also writes the sources here before it looks for a prebuilt library.
    if not path.exists():
        alike = (file for file in sorted(Path.cwd().rglob(path.name)) if file.parent.name == path.parent.name)
        path = next(alike, path)
    try:
        with path.open(encoding="utf-8", errors="replace") as stream:
            return next(itertools.islice(stream, number - 1, None), "").strip()[:_TEXT] or None
    except OSError:
        return None


def _kernel(name: str, launches: list[Mapping[str, str]]) -> dict[str, Any]:
    durations = [_number(launch, "gpu__time_duration.sum") or 0.0 for launch in launches]
    longest = launches[max(range(len(launches)), key=durations.__getitem__)]
    bandwidth = [_number(launch, "dram__bytes.sum.per_second") for launch in launches]
    moved = sum(rate * ns / 1e9 for rate, ns in zip(bandwidth, durations, strict=True) if rate is not None)
    of = {
        "grid": _dimensions(longest, "grid_dim"),
        "block": _dimensions(longest, "block_dim"),
        "registers": _whole(longest, "launch__registers_per_thread"),
        "shared_bytes": _shared(longest),
        "spills": _whole(longest, "sass__inst_executed_register_spilling"),
        "occupancy": _share(longest, "sm__warps_active.avg.pct_of_peak_sustained_active"),
        "occupancy_limit": _limit(longest),
        "dram_bytes": moved if any(rate is not None for rate in bandwidth) else None,
        "dram_gbs": _product(longest, "dram__bytes.sum.per_second"),
        "dram_share": _share(longest, "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"),
        "compute_share": _share(longest, "sm__throughput.avg.pct_of_peak_sustained_elapsed"),
        "tensor_share": _share(longest, "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"),
        "gflops": _gflops(longest),
        "l2_hits": _share(longest, "lts__t_sector_hit_rate.pct"),
    }
    return (
        {"name": name, "launches": len(launches), "duration_ms": sum(durations) / 1e6, _PLACE: int(longest[_PLACE])}
        | of
        | {"stalls": _stalls(longest)}
    )


def _gflops(launch: Mapping[str, str]) -> float | None:
    """Return the executed operations in 10^9 per second, from counters per cycle of all multiprocessors together."""
    cycles = _number(launch, "smsp__cycles_elapsed.avg.per_second")
    weights = {"fadd": 1, "fmul": 1, "ffma": 2, "dadd": 1, "dmul": 1, "dfma": 2}
    name = "smsp__sass_thread_inst_executed_op_{}_pred_on.sum.per_cycle_elapsed"
    counts = {op: _number(launch, name.format(op)) for op in weights}
    executed = [weights[op] * count for op, count in counts.items() if count is not None]
    return sum(executed) * cycles / 1e9 if executed and cycles is not None else None


def _stalls(launch: Mapping[str, str]) -> list[dict[str, Any]]:
    waits = {match[1]: _number(launch, name) or 0.0 for name in launch if (match := _STALL.fullmatch(name))}
    waits = {reason: ratio for reason, ratio in waits.items() if reason not in _AT_WORK and ratio > 0}
    total = sum(waits.values())
    first = sorted(waits.items(), key=lambda pair: -pair[1])[:3]
    return [{"reason": reason, "share": ratio / total} for reason, ratio in first]


def _limit(launch: Mapping[str, str]) -> str | None:
    blocks = {resource: _number(launch, f"launch__occupancy_limit_{name}") for name, resource in _LIMITS.items()}
    limits = {resource: number for resource, number in blocks.items() if number is not None}
    return min(limits, key=limits.__getitem__) if limits else None


def _shared(launch: Mapping[str, str]) -> int | None:
    parts = [_whole(launch, f"launch__shared_mem_per_block_{kind}") for kind in ("static", "dynamic")]
    sizes = [part for part in parts if part is not None]
    return sum(sizes) if sizes else None


def _dimensions(launch: Mapping[str, str], name: str) -> list[int] | None:
    numbers = [_whole(launch, f"launch__{name}_{axis}") for axis in "xyz"]
    sizes = [number for number in numbers if number is not None]
    return sizes if len(sizes) == 3 else None


def _product(launch: Mapping[str, str], *factors: str | int) -> float | None:
    """Return a product of counters and numbers, in units of 10^9."""
    product = 1e-9
    for factor in factors:
        value = factor if isinstance(factor, int) else _number(launch, factor)
        if value is None:
            return None
        product *= value
    return product


def _share(launch: Mapping[str, str], name: str) -> float | None:
    percent = _number(launch, name)
    return None if percent is None else min(max(percent / 100, 0.0), 1.0)


def _whole(launch: Mapping[str, str], name: str) -> int | None:
    number = _number(launch, name)
    return None if number is None else round(number)


def _number(launch: Mapping[str, str], name: str) -> float | None:
    try:
        return float(launch[name].replace(",", ""))
    except (KeyError, ValueError):
        return None
