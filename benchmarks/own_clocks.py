"""Time one kernel by the clocks of its process, for a comparison with the judge's clock in `clock.py`.

It is started early, imports its modules, and waits for a job, one line of JSON on stdin::

    {"problem": source, "kernel": source, "methods": ["events", "graph", "do_bench", "cupti"]}

It answers with one line of JSON on stdout: median, quartiles and count for each method, in microseconds. Other output
goes to stderr. The exit status is 0 unless a method failed. It does not use the GPU before it has a job, and exits at
once if stdin ends without one.

All methods start from a cold L2 (a fill of twice its size precedes each call). In all except Triton's ``do_bench`` a
longer kernel keeps the GPU busy during the launch, so that no launch delays the GPU:

- ``events``: CUDA events around a call.
- ``graph``: CUDA events around the replay of a CUDA graph of one call.
- ``do_bench``: ``triton.testing.do_bench(return_mode="median")``.
- ``cupti``: CUPTI's records of a call's kernels, through torch's profiler, from the start of the first to the end of
  the last. ``cupti_busy`` is the sum of the kernels' times.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

#: GPU cycles of the kernel that runs while a call is enqueued, about half a millisecond.
_AHEAD_CYCLES: Final = 1_000_000
#: Number of GPU activities before each call: the busy kernel, and the flush of the L2.
_BEFORE: Final = 2
#: Seconds for the timed calls, whose number is bounded by the next line.
_SECONDS: Final = 0.15
_FEWEST, _MOST = 11, 51
_WARMUP: Final = 10
#: Largest number of attempts at a complete recording.
_TRIES: Final = 3

Call = Callable[[], object]


def subject(problem: str, kernel: str, directory: Path) -> Call:
    """Return a function that calls the kernel's ``ModelNew`` once on the problem's inputs, on the GPU.

    The kernel's source is written to ``directory``, because Triton reads sources from files.
    """
    reference = types.ModuleType("problem")
    exec(compile(problem, "<problem>", "exec"), reference.__dict__)
    path = directory / "own_kernel.py"
    path.write_text(kernel, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("own_kernel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["own_kernel"] = module
    spec.loader.exec_module(module)
    model = module.ModelNew(*reference.get_init_inputs()).to("cuda")
    inputs = [value.to("cuda") if isinstance(value, torch.Tensor) else value for value in reference.get_inputs()]
    return lambda: model(*inputs)


def cold() -> Call:
    """Return the function to run before each call, which keeps the GPU busy and then flushes the L2."""
    size: int = torch.cuda.get_device_properties(0).L2_cache_size
    buffer = torch.empty(2 * size, dtype=torch.uint8, device="cuda")
    cuda: Any = torch.cuda

    def before() -> None:
        cuda._sleep(_AHEAD_CYCLES)
        buffer.zero_()

    return before


def spans(call: Call, before: Call, count: int) -> list[float]:
    """Return the microseconds between events around each of ``count`` calls."""
    found: list[float] = []
    for _ in range(count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1e3)
    return found


def graph_of(call: Call) -> Call:
    """Return the replay of a CUDA graph of one call."""
    side: Any = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph.replay


def recorded(call: Call, before: Call, count: int) -> list[list[tuple[float, float]]]:
    """Return start and end in microseconds of each kernel of ``count`` calls, by CUPTI.

    Raises:
        RuntimeError: the recordings differ between the calls.
    """
    found: list[tuple[float, float, str]] = []
    for _ in range(_TRIES):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(count):
                before()
                call()
                torch.cuda.synchronize()
        found = sorted(
            (event.time_range.start, event.time_range.end, event.name)
            for event in profile.events() or []
            if event.device_type.name == "CUDA" and not event.is_user_annotation
        )
        if (calls := by_call(found, count)) is not None:
            return calls
    raise RuntimeError(f"torch's profiler recorded {len(found)} activities of {count} calls, which differ")


def by_call(found: list[tuple[float, float, str]], count: int) -> list[list[tuple[float, float]]] | None:
    """Split ordered activities (start, end, name) by call, without the busy kernel and the flush before each call.

    Returns:
        Start and end of each activity by call, or None if the calls' activities differ.
    """
    each, rest = divmod(len(found), count)
    if rest or each <= _BEFORE:
        return None
    calls = [found[i : i + each] for i in range(0, len(found), each)]
    names = {tuple(name for _, _, name in activities) for activities in calls}
    return (
        [[(begin, end) for begin, end, _ in activities[_BEFORE:]] for activities in calls] if len(names) == 1 else None
    )


def quartiles(values: list[float]) -> dict[str, float]:
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median_us": median, "q1_us": q1, "q3_us": q3, "count": len(values)}


def measure(call: Call, methods: list[str]) -> dict[str, Any]:
    """Time the call by each method. CUPTI is last, because it remains attached after its first use."""
    before = cold()
    for _ in range(_WARMUP):
        call()
    torch.cuda.synchronize()
    estimate = statistics.median(spans(call, before, 3))
    count = min(_MOST, max(_FEWEST, int(_SECONDS * 1e6 / estimate)))
    answer: dict[str, Any] = {}
    if "events" in methods:
        answer["events"] = quartiles(spans(call, before, count))
    answer["sm_mhz"] = sm_mhz()
    if "graph" in methods:
        answer["graph"] = quartiles(spans(graph_of(call), before, count))
    if "do_bench" in methods:
        testing: Any = importlib.import_module("triton.testing")
        answer["do_bench"] = {"median_us": testing.do_bench(call, return_mode="median") * 1e3}
    if "cupti" in methods:
        calls = recorded(call, before, count)
        answer["kernels"] = len(calls[0])
        answer["cupti"] = quartiles([max(end for _, end in one) - one[0][0] for one in calls])
        answer["cupti_busy"] = quartiles([sum(end - begin for begin, end in one) for one in calls])
    return answer


def sm_mhz() -> float:
    """Return the current SM clock in MHz from NVML."""
    import pynvml

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
        return float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
    finally:
        pynvml.nvmlShutdown()


def main() -> int:
    """Run one job from stdin. Return the exit status."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in ("triton", "triton.testing", "cupy"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    line = sys.stdin.readline()
    if not line:
        return 0
    job = json.loads(line)
    if not torch.cuda.is_available():
        print("torch finds no GPU", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="kqueue-own-") as directory, torch.no_grad():
        answer = measure(subject(job["problem"], job["kernel"], Path(directory)), job["methods"])
    print(json.dumps(answer), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
