"""Sample requests and outcomes for tests."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Any, Final

from kqueue.categories import Category
from kqueue.contract import Outcome, Phase
from kqueue.evidence import (
    NEEDS,
    Evidence,
    Histogram,
    KernelProfile,
    Measurement,
    Profile,
    Sanitized,
    SanitizerFinding,
    SourceLine,
    Stall,
)

#: A value for each fact that some category needs.
_FACTS: Final[dict[str, Any]] = {
    "exception": "builtins.RuntimeError", "cuda_code": 700,
    "findings": [{"rule": "r", "severity": "cheat", "line": 1, "evidence": "e", "by": "kqueue", "meaning": "m"}],
    "reason": "deadline", "signal": "SIGSEGV", "structure": "[T]", "input": 0, "output": 0, "kind": "given", "wrong": 1,
    "of": 4, "first": [{"index": [0], "expected": 1.0, "got": 2.0}], "hack": "decoy", "failed": 2,
    "clocks": {"sm_mhz": 210.0}, "instead_of": "wrong_values",
}  # fmt: skip

#: A problem for real judges, and a kernel whose `forward` has this body.
RELU: Final = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x)
def get_inputs():
    return [torch.randn(64, 64)]
def get_init_inputs():
    return []
"""
RELU_KERNEL: Final = """
import time, torch
class ModelNew(torch.nn.Module):
    def forward(self, x):
        {}
"""


def ended(category: Category, **fields: Any) -> Outcome:
    """Return an outcome of this category with its required fields only. ``fields`` replace them."""
    needs = NEEDS[category]
    least: dict[str, Any] = {"facts": {name: _FACTS[name] for name in (*needs.facts, *needs.one_of[:1])}}
    if needs.message:
        least["message"] = f"ended as {category}"
    if needs.phase:
        least["phase"] = Phase.CHECK
    return Outcome(category=category, **least | fields)


def stated(receipt: bytes | str) -> Any:
    """Return the content of a receipt: the predicate of the statement in its envelope."""
    return json.loads(b64decode(json.loads(receipt)["payload"]))["predicate"]


def request_fields(number: int = 0, **changes: object) -> dict[str, object]:
    """Return the fields of a valid request for the lane ``cpu``. Another ``number`` makes another kernel."""
    fields: dict[str, object] = {
        "problem": "class Model: ...",
        "kernel": f"class ModelNew: number = {number}",
        "backend": "torch",
        "lane": "cpu",
    }
    return fields | changes


def measurement(median_ms: float) -> Measurement:
    """Return a measurement as a judge would take it."""
    return Measurement(
        basis="cpu_clock", count=100, median_ms=median_ms, q1_ms=median_ms * 0.9, q3_ms=median_ms * 1.1,
        mean_ms=median_ms, std_ms=0.01, min_ms=median_ms * 0.8, max_ms=median_ms * 2, overhead_ms=0.002, cold_l2=True,
    )  # fmt: skip


def passed(**fields: Any) -> Outcome:
    """Return the outcome of a right kernel that is twice as fast as the reference. ``fields`` replace its fields."""
    least: dict[str, Any] = {"runtime": measurement(0.5), "baseline": measurement(1.0)}
    return Outcome(category=Category.PASSED, **least | fields)


def timed(ms: float) -> Outcome:
    """Return the outcome of a right kernel and a reference of 1 ms, both with intervals of 10 % on either side."""
    runtime, baseline = (
        measurement(one).model_copy(update={"low_ms": one * 0.9, "high_ms": one * 1.1}) for one in (ms, 1.0)
    )
    return passed(runtime=runtime, baseline=baseline)


def examined(name: str) -> Outcome:
    """Return the outcome of a right kernel with reports of tools, all of whose texts contain ``name``."""
    finding = SanitizerFinding(
        kind=f"Invalid __global__ read in {name}", kernel=name, file=name, line=8, thread=(122, 0, 0), block=(3, 0, 0),
        allocation_bytes=4000, distance_bytes=1, count=2,
    )  # fmt: skip
    kernel = KernelProfile(
        name=name, launches=1, duration_ms=0.5, occupancy=0.5, dram_gbs=100.0, dram_share=0.03, gflops=50.0,
        stalls=(Stall(reason="long_scoreboard", share=0.75),),
        lines=(SourceLine(file=name, line=16, share=0.9, text=name), SourceLine(file="cuda.cu", line=3, share=0.1)),
    )  # fmt: skip
    runtime = measurement(1.0).model_copy(update={"histogram": Histogram(low_ms=0.5, high_ms=1.5, counts=(1, 0, 8, 2))})
    evidence = Evidence(
        sanitized=(
            Sanitized(tool="memcheck", errors=2, findings=(finding,), seconds=2.0),
            Sanitized(tool="racecheck", error=f"it did not end: {name}", seconds=300.0),
        ),
        profile=Profile(by="ncu", kernels=(kernel,), peak_gbs=4000.0, peak_gflops=60_000.0, seconds=3.0),
    )
    return passed(runtime=runtime, evidence=evidence)
