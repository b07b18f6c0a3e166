"""Examinations: the kernel runs again under compute-sanitizer and Nsight Compute."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kqueue.categories import Category
from kqueue.contract import Examination, Outcome, Phase, Request, Sanitizer, Settings, Timing
from tests.judge import extension
from tests.judge.rig import Rig
from tests.judge.sources import kernel, problem, suite_of
from workers.judge.candidate import examiner
from workers.judge.channel import reports
from workers.judge.channel.flags import memory
from workers.judge.host.status_page import StatusPage
from workers.judge.host.turns import opened
from workers.judge.pipeline.cpu import CpuTime
from workers.judge.pipeline.evidence import Observed
from workers.judge.pipeline.processes import Processes
from workers.judge.pipeline.steps import Steps

pytestmark = pytest.mark.slow("compiles and examines kernels")

#: Output of compute-sanitizer 2025.3 and Nsight Compute 2025.3 on an H100, the latter with the used columns only.
RECORDED = Path(__file__).parent / "recorded"
#: Time in seconds for which another process holds the device.
WAIT_S = 2.0

PLAIN = kernel("x: x + 1")
PROBLEM = problem("x: x + 1", "return [torch.rand(1000)]")
#: Kernel that reads 24 values beyond its input, without an effect on the answer.
TRITON = """
import torch, triton
import triton.language as tl

@triton.jit
def add_one(x_ptr, out_ptr, n, SIZE: tl.constexpr, MASKED: tl.constexpr):
    at = tl.arange(0, SIZE)
    x = tl.load(x_ptr + at, mask=at < n) if MASKED else tl.load(x_ptr + at)
    tl.store(out_ptr + at, x + 1, mask=at < n)

class ModelNew(torch.nn.Module):
    def forward(self, x):
        out = torch.{made}
        add_one[(1,)](x, out, x.numel(), SIZE=1024, MASKED={masked})
        return out
"""
CUDA = '''
import torch
from torch.utils.cpp_extension import load_inline

module = load_inline(
    name="racy",
    cpp_sources="torch::Tensor add_one(torch::Tensor x);",
    cuda_sources=r"""
#include <torch/extension.h>
__global__ void racy(const float* x, float* out, int n) {
    __shared__ float kept[1024];
    int i = threadIdx.x;
    kept[i] = i < n ? x[i] : 0.0f;
    float others = 0.0f;
    for (int k = 1; k < 500; ++k) others += kept[(i + 33 * k) % 1024];  // so long that its lines are seen
    out[i < n ? i : 0] = (i < n ? kept[i] : kept[0]) + 1.0f + 0.0f * others;
}
torch::Tensor add_one(torch::Tensor x) {
    auto out = torch::empty_like(x);
    racy<<<1, 1024>>>(x.data_ptr<float>(), out.data_ptr<float>(), x.numel());
    return out;
}
""",
    functions=["add_one"],
)

class ModelNew(torch.nn.Module):
    def forward(self, x):
        return module.add_one(x)
'''


def judge(rig: Rig, kernel: str, backend: str = "triton", **examine: Any) -> Outcome:
    settings = Settings(checks=1, timing=Timing().off(), examine=Examination(**examine))
    return rig.judge(Request(problem=PROBLEM, kernel=kernel, backend=backend, settings=settings))


def triton(made: str = "empty_like(x)", *, masked: bool) -> str:
    """Return a kernel with correct answers that reads beyond its input unless it is masked."""
    return TRITON.replace("{made}", made).replace("{masked}", str(masked))


@pytest.fixture
def compiling_rig(gpu: str, judge_environment: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """A slot on the first GPU, where Triton compiles. Other tests run Triton's interpreter."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with Rig(gpu) as rig:
        yield rig


def test_the_words_of_compute_sanitizer_are_read() -> None:
    told = examiner.findings((RECORDED / "memcheck.log").read_text())
    [finding] = told["findings"]
    assert told["errors"] == 16
    assert finding.pop("detail").endswith(
        "is 1 bytes after the nearest allocation at 0x7f819a800000 of size 4,000 bytes"
    )
    assert finding == {
        "kind": "Invalid __global__ read of size 16 bytes",
        "kernel": "k",
        "file": "k.py",
        "line": 5,
        "thread": [122, 0, 0],
        "block": [0, 0, 0],
        "address": "0x7f819a800fa0",
        "size_bytes": 16,
        "allocation_bytes": 4000,
        "distance_bytes": 1,
        "count": 3,
    }


def test_the_counters_of_nsight_compute_are_read() -> None:
    told = examiner.profile("", (RECORDED / "ncu.csv").read_text())
    first, second = told["kernels"]
    assert (first["place"], second["place"]) == (1, 0)
    assert (first["name"], first["launches"], first["duration_ms"]) == ("k", 1, 0.00272)
    assert "FillFunctor" in second["name"]
    assert (first["grid"], first["block"], first["registers"]) == ([2, 1, 1], [128, 1, 1], 18)
    assert first["dram_gbs"] == pytest.approx(4.141, rel=1e-3)
    assert first["dram_bytes"] == pytest.approx(4.141 * 2720, rel=1e-3)
    assert first["gflops"] == pytest.approx(0.48 * 1.557, rel=1e-2)
    assert [stall["reason"] for stall in first["stalls"]] == ["long_scoreboard", "no_instruction", "imc_miss"]
    assert told["peak_gbs"] == pytest.approx(1280 * 2.5835, rel=1e-3)
    assert told["peak_gflops"] == pytest.approx(2 * 16896 * 1.557, rel=1e-3)


def test_the_lines_of_kernels_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "kernel.py").write_text("\n" * 15 + "        v = tl.sin(v) + 0.5\n")
    monkeypatch.chdir(tmp_path)
    table = (RECORDED / "source.csv").read_text()
    first, second, *_ = slow = examiner.lines(table, "slow")
    assert (first["file"], first["line"], first["text"]) == ("kernel.py", 16, "v = tl.sin(v) + 0.5")
    assert first["share"] == pytest.approx(165909 / (447 + 14234 + 3788 + 417 + 165909 + 27))
    assert (second["line"], second["text"]) == (13, None)
    assert [line["line"] for line in slow] == [16, 13, 14, 12, 15]
    soft = examiner.lines(table, "soft")
    assert [(line["file"], line["line"]) for line in soft] == [
        ("standard.py", 170),
        ("kernel.py", 10),
        ("standard.py", 263),
        ("kernel.py", 8),
        ("standard.py", 191),
    ]
    assert soft[0]["text"] is None
    quoted = examiner.lines(table.replace('"1175"', '"0"').replace('"53","26","53"', '"9999","26","9999"'), "soft")
    assert quoted[0]["line"] == 6  # other=-float("inf")


def test_a_hostile_log_breaks_nothing() -> None:
    for log in ("", "=========", "========= \n\0", '"a","b"\n"1"\n', "==ERROR== no such thing"):
        assert examiner.findings(log)["errors"] is None
        assert not examiner.profile(log, log)["kernels"]
        assert not examiner.lines(log, "k")
    told = examiner.profile("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n", "")
    assert "ERR_NVGPUCTRPERM" in told["error"]


def test_a_report_comes_back_as_it_was_written() -> None:

    def written(data: bytes) -> dict[str, Any]:
        page = memory("report", reports.SIZE)
        try:
            reports.write(page, data.decode()) if data.isascii() else os.pwrite(page, data, 0)
            return reports.read(page)
        finally:
            os.close(page)

    assert written(b'{"errors": 3}') == {"errors": 3}
    long = json.dumps({"detail": "x" * reports.SIZE}).encode()
    for wrong in (b"", b"\xff\xfe", b"[]", b"{" * 100_000, b'{"errors":', long):
        with pytest.raises(reports.NotReported):
            written(wrong)


def test_without_a_gpu_it_says_so(rig: Rig) -> None:
    settings = Settings(examine=Examination(profile=True))
    with pytest.raises(ValidationError, match="need a GPU"):
        Request(problem=PROBLEM, kernel=PLAIN, backend="torch", lane="cpu", settings=settings)
    outcome = judge(rig, PLAIN, "torch", sanitize=("memcheck",), profile=True)
    assert outcome.category is Category.PASSED
    assert outcome.evidence.sanitized is not None
    assert [run.error for run in outcome.evidence.sanitized] == ["it needs a GPU"]
    assert outcome.evidence.profile is not None
    assert outcome.evidence.profile.error == "it needs a GPU"


@pytest.mark.gpu
def test_a_read_beyond_an_input_is_found(compiling_rig: Rig) -> None:
    outcome = judge(compiling_rig, triton(masked=False), sanitize=("memcheck",))
    assert outcome.category is Category.PASSED, outcome.message
    [run] = outcome.evidence.sanitized or ()
    [finding] = run.findings
    assert finding.kind.startswith("Invalid __global__ read")
    assert (finding.kernel, finding.file, finding.line) == ("add_one", "kernel.py", 8)
    assert (finding.allocation_bytes, finding.distance_bytes) == (4000, 1)
    outcome = judge(compiling_rig, triton(masked=True), sanitize=("memcheck",))
    [run] = outcome.evidence.sanitized or ()
    assert (run.errors, run.findings, run.error) == (0, (), None)


@pytest.mark.gpu
@pytest.mark.timeout(400)
def test_a_race_is_found(compiling_rig: Rig) -> None:
    outcome = judge(compiling_rig, CUDA, "cuda", sanitize=("racecheck",), profile=True)
    [run] = outcome.evidence.sanitized or ()
    assert any("Race" in finding.kind for finding in run.findings), (run, outcome.category, outcome.message)
    assert any(finding.file and finding.file.endswith(".cu") for finding in run.findings)
    assert outcome.evidence.profile is not None
    if outcome.evidence.profile.by == "ncu":
        [kernel] = [kernel for kernel in outcome.evidence.profile.kernels if "racy" in kernel.name]
        assert {line.file for line in kernel.lines} == {"cuda.cu"}
        assert any("others +=" in (line.text or "") for line in kernel.lines)


@pytest.mark.gpu
def test_a_kernel_is_profiled(compiling_rig: Rig) -> None:
    outcome = judge(compiling_rig, triton(masked=True), profile=True)
    assert outcome.category is Category.PASSED, outcome.message
    profile = outcome.evidence.profile
    assert profile is not None
    assert "add_one" in [kernel.name for kernel in profile.kernels], profile
    if profile.by == "ncu":
        assert not profile.error
        [kernel] = [kernel for kernel in profile.kernels if kernel.name == "add_one"]
        assert (kernel.launches, kernel.grid) == (1, (1, 1, 1))
        assert kernel.registers
        assert {line.file for line in kernel.lines} <= {"kernel.py"}  # a short kernel can have no sampled line
        assert profile.peak_gbs
        assert profile.peak_gbs > 100


#: Program that replaces a tool: it runs the command that follows the tool's own options.
TOOL = f"""#!/bin/sh
while [ "$1" != "{sys.executable}" ]; do [ "$1" = --log-file ] && log="$2"; shift; done
echo "========= ERROR SUMMARY: 0 errors" > "$log"
exec "$@"
"""


@pytest.fixture(scope="module")
def tool_rig(judge_environment: None) -> Iterator[Rig]:
    if os.geteuid() != 0:
        pytest.skip("programs under a tool need user ids of their own")
    with tempfile.TemporaryDirectory(prefix="kqueue-tool-") as home, pytest.MonkeyPatch.context() as patch:
        tool = Path(home) / "bin" / "compute-sanitizer"
        tool.parent.mkdir()
        tool.write_text(TOOL)
        for path in (Path(home), tool.parent, tool):
            path.chmod(0o755)
        patch.setenv("CUDA_HOME", home)
        with Rig() as rig:
            yield rig


@pytest.mark.nightly
def test_a_tool_starts_before_the_device_is_had(tool_rig: Rig) -> None:
    slot = tool_rig.slot
    asked = Request(problem=PROBLEM, kernel=PLAIN, backend="torch", settings=Settings())
    steps = Steps(StatusPage(), slot, asked.settings.total_s)
    examining = Processes(asked, slot, tool_rig.forkserver, CpuTime()).examiner(asked, steps)
    with opened(slot.lock) as others:
        fcntl.flock(others, fcntl.LOCK_EX)
        release = threading.Timer(WAIT_S, fcntl.flock, (others, fcntl.LOCK_UN))
        release.start()
        pytests = signal.getsignal(signal.SIGALRM)  # restored below, because a step replaces the handler
        told = examining.sanitize("memcheck")
        signal.signal(signal.SIGALRM, pytests)
        release.join()
    if "cannot be sealed here" in (told.error or ""):
        pytest.skip(told.error)
    assert (told.errors, told.error) == (0, None)
    spent = sum(steps.durations[name] for name in ("start_examine", "untimed_examine", "read_examine"))
    assert told.seconds == pytest.approx(spent, abs=1e-3)
    assert steps.durations["wait_for_device"] + steps.durations["start_examine"] >= WAIT_S * 0.9
    assert steps.begun["untimed_examine"] >= WAIT_S * 0.9


#: Kernel that reports whether its library was given or compiled. Under a tool it raises, because no log is read there.
GIVEN = """
how = "compiled" if list(Path(os.environ["TORCH_EXTENSIONS_DIR"]).rglob("*.o")) else "given"
if Path("job.json").exists():
    raise ValueError(how)
"""


@pytest.mark.nightly
def test_what_a_builder_has_made_is_not_compiled_under_a_tool(tool_rig: Rig) -> None:
    settings = Settings(examine=Examination(sanitize=(Sanitizer.MEMCHECK,)))
    asked = Request(problem=extension.PROBLEM, kernel=extension.kernel(after=GIVEN), backend="cpp", settings=settings)
    steps = Steps(StatusPage(), tool_rig.slot, asked.settings.total_s)
    processes = Processes(asked, tool_rig.slot, tool_rig.forkserver, CpuTime())
    pytests = signal.getsignal(signal.SIGALRM)
    try:
        processes.begin_reference()
        candidate = processes.begin_candidate()
        assert processes.build(Observed()).libraries == 1
        candidate.process.stop()
        error = processes.examiner(asked, steps).sanitize("memcheck").error or ""
        if "cannot be sealed here" in error:
            pytest.skip(error)
        assert "ValueError: given" in error
    finally:
        signal.signal(signal.SIGALRM, pytests)
        processes.end(Outcome(category=Category.PASSED, message="", phase=Phase.EXAMINE), {})


@pytest.mark.nightly
def test_tests_are_watched_by_compute_sanitizer(tool_rig: Rig, tmp_path: Path) -> None:
    request = suite_of(tmp_path, "def test_it(): assert 0\n", names=["test_it"], examine={"sanitize": ["memcheck"]})
    outcome = tool_rig.judge(request)
    Path(os.environ["CUDA_HOME"], "bin", "compute-sanitizer").unlink()
    without = tool_rig.judge(request)
    isolation = tool_rig.forkserver.isolation
    if any(isolation[measure] is not True for measure in ("own_uid", "seccomp", "files", "mounts")):
        assert outcome.category is Category.JUDGE_ERROR
        return
    assert outcome.category is Category.TESTS_FAILED, outcome.message
    assert outcome.evidence.tests is not None
    assert outcome.evidence.tests.findings == "========= ERROR SUMMARY: 0 errors"
    assert without.category is Category.JUDGE_ERROR
    assert "compute-sanitizer is not installed" in without.message
