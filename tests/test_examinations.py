"""Requests to a judge for an examination, and the text and picture of its results."""

from __future__ import annotations

import pytest

from kqueue import examinations
from kqueue.contract import Request, Sanitizer
from kqueue.errors import InvalidRequest
from kqueue.evidence import Evidence, KernelProfile, Profile, Sanitized, SanitizerFinding, SourceLine, Stall

PROBLEM = """
SIZE = 4000
class Model:
    layers = 4000
def get_inputs():
    return [torch.randn(SIZE, 1024, 3)]
"""
SMALL = PROBLEM.replace("SIZE = 4000", "SIZE = 125").replace("1024", "128")
TOOLS = (Sanitizer.MEMCHECK, Sanitizer.RACECHECK)

OUTSIDE = SanitizerFinding(
    kind="Invalid __global__ read of size 16 bytes", kernel="k", file="kernel.py", line=8, block=(0, 0, 0),
    thread=(122, 0, 0), address="0xfa0", size_bytes=16, allocation_bytes=400, distance_bytes=1, count=6,
)  # fmt: skip
COUNTED = KernelProfile(
    name="k", launches=1, duration_ms=0.5, grid=(2, 1, 1), block=(128, 1, 1), registers=18, spills=0, dram_bytes=1e9,
    dram_gbs=2000.0, dram_share=0.5, gflops=500.0, stalls=(Stall(reason="long_scoreboard", share=0.75),),
    lines=(
        SourceLine(file="kernel.py", line=16, share=0.9, text="v = tl.sin(v)"),
        SourceLine(file="cuda.cu", line=3, share=0.1),
    ),
)  # fmt: skip
PROFILE = Profile(by="ncu", kernels=(COUNTED,), peak_gbs=4000.0, peak_gflops=60_000.0, seconds=3.0)


def request(lane: str = "gpu") -> Request:
    return Request(problem=PROBLEM, kernel="class ModelNew: ...", backend="triton", lane=lane)


def test_small_sizes_precede_the_kernel_s_own() -> None:
    """The original problem comes last, and alone if it is asked for or small already."""
    [small, own] = examinations.sanitizing(request(), TOOLS)
    assert (small.problem, own.problem, own.settings.examine.sanitize) == (SMALL, PROBLEM, TOOLS)
    assert (own.settings.timing.enabled, own.reuse) == (False, False)
    assert examinations.sanitizing(request(), TOOLS, whole=True) == [own]
    assert len(examinations.sanitizing(small, TOOLS)) == 1


def test_a_profile_is_of_the_whole_problem_and_not_on_the_cpu() -> None:
    [one] = examinations.profiling(request())
    assert (one.problem, one.settings.timing.enabled, one.settings.examine.profile) == (PROBLEM, True, True)
    for examine in (examinations.profiling, lambda one: examinations.sanitizing(one, TOOLS)):
        with pytest.raises(InvalidRequest, match="another lane than cpu"):
            examine(request("cpu"))


def test_findings_in_words() -> None:
    """Findings have the tool, the place and the distance from a buffer, and an incomplete run is not clean."""
    runs = (
        Sanitized(tool="memcheck", errors=6, findings=(OUTSIDE,), seconds=7.44),
        Sanitized(tool="racecheck", errors=0, seconds=1.0),
        Sanitized(tool="initcheck", error="it did not end within 300 s", seconds=300.0),
    )
    assert list(examinations.lines(Evidence(sanitized=runs))) == [
        "memcheck: 6 errors at 1 place (7.4 s)",
        "  Invalid __global__ read of size 16 bytes in k at kernel.py:8, 6 times",
        "    the first: thread (122, 0, 0) of block (0, 0, 0), address 0xfa0, 1 byte after an allocation of 400 bytes",
        "racecheck: no findings (1.0 s)",
        "initcheck: no result: it did not end within 300 s",
    ]
    for distance, said in ((-2, "2 bytes before an"), (1, "1 byte after an"), (0, "begins within an")):
        run = Sanitized(tool="m", findings=(OUTSIDE.model_copy(update={"distance_bytes": distance}),), seconds=1.0)
        assert f"{said} allocation of 400 bytes" in "\n".join(examinations.lines(Evidence(sanitized=(run,))))


def test_a_profile_in_words() -> None:
    text = "\n".join(examinations.lines(Evidence(profile=PROFILE)))
    for told in (
        "by Nsight Compute (3.0 s)", "k: 0.5 ms, grid (2, 1, 1) of (128, 1, 1) threads",
        "memory: 1e+09 bytes, 2000 GB/s, peak 4000 GB/s, 50% of it", "compute: 500 GFLOP/s, peak 6e+04 GFLOP/s",
        "18 registers a thread, 0 spills", "warps wait for: long_scoreboard 75%",
        "90% at kernel.py:16: v = tl.sin(v)\n", "10% at cuda.cu:3",
    ):  # fmt: skip
        assert told in text, told
    assert "occupancy" not in text
