"""The checks of `kqueue doctor --deep` on a worker's host: judge a kernel of every backend on every GPU.

:class:`kqueue.judging.LocalJudge` judges them like any kernel, in sealed processes with fresh contexts. So each check
covers compiler, driver, seal and comparison. They do not disturb a fleet of the same user and scratch directory,
because they lock devices and book memory like that fleet's workers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from textwrap import indent
from typing import Final

from kqueue.categories import Category
from kqueue.config import Config
from kqueue.doctor import Result, State
from kqueue.errors import JudgeUnavailable
from kqueue.judging import LocalJudge
from kqueue.text import one_line
from workers.judge.gpu.devices import choose, devices


def _kernel(forward: str, before: str = "") -> str:
    """Return the source of a kernel whose ``forward`` has the given body, after the code ``before``."""
    body = indent(forward, " " * 8)
    return f"import torch\n{before}\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n{body}\n"


def _problem(kernel: str, shape: str) -> str:
    """Return the source of the problem that a kernel solves for inputs of ``shape``."""
    inputs = f"def get_inputs():\n    return [torch.randn({shape})]\n\ndef get_init_inputs():\n    return []\n"
    return f"{kernel.replace('ModelNew(', 'Model(')}\n{inputs}"


_PROBLEM: Final = _problem(_kernel("return x * 2 + 1"), "4096")
_RIGHT: Final = _kernel("return x + x + 1")
_WRONG: Final = _kernel("return x + x + 1.1")
_ENDLESS: Final = _kernel("while True: pass")
_WEIGHTS: Final = """
import torch

class ModelNew(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.0), torch.nn.Linear(64, 64))
    def forward(self, x):
        return self.layers(x)
"""
_OPERATIONS: Final = """
image = x.reshape(1, 4, 64, 64)
answers = (
    x @ x[:128].T,
    torch.nn.functional.conv2d(image, image[:, :, :3, :3]),
    torch.nn.functional.layer_norm(x, (128,)),
    torch.softmax(x, 1),
    torch.sort(x, 1).values,
    torch.cumsum(x, 0),
    x.amax(0),
)
return answers"""
#: The same operations on the CPU in float64.
_ON_HOST: Final = _kernel(
    "given, x = x, x.cpu().double()"
    + _OPERATIONS.replace("return answers", "return tuple(answer.float().to(given.device) for answer in answers)")
)
_TRITON: Final = _kernel(
    """
out = torch.empty_like(x)
kernel[(triton.cdiv(x.numel(), 256),)](x, out, x.numel(), BLOCK=256)
return out""",
    """
import triton
import triton.language as tl

@triton.jit
def kernel(x, out, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place, tl.load(x + place, mask=place < n) * 2 + 1, mask=place < n)
""",
)
_CPP: Final = _kernel(
    "return built.f(x)",
    """
from torch.utils.cpp_extension import load_inline

built = load_inline("deep_cpp", cpp_sources="torch::Tensor f(torch::Tensor x) { return x * 2 + 1; }", functions=["f"])
""",
)
_CUDA: Final = _kernel(
    "return built.f(x)",
    '''
from torch.utils.cpp_extension import load_inline

code = """
__global__ void kernel(const float* x, float* out, long n) {
    long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] * 2 + 1;
}
torch::Tensor f(torch::Tensor x) {
    auto out = torch::empty_like(x);
    kernel<<<(x.numel() + 255) / 256, 256>>>(x.data_ptr<float>(), out.data_ptr<float>(), x.numel());
    return out;
}
"""
built = load_inline("deep_cuda", cpp_sources="torch::Tensor f(torch::Tensor x);", cuda_sources=code, functions=["f"])
''',
)
_CUPY: Final = _kernel(
    """
out = torch.empty_like(x)
with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
    kernel(((x.numel() + 255) // 256,), (256,), (x.data_ptr(), out.data_ptr(), x.numel()))
return out""",
    """
import cupy

kernel = cupy.RawKernel(r'''
extern "C" __global__ void f(const float* x, float* out, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] * 2 + 1;
}''', "f")
""",
)


@dataclass(frozen=True, slots=True)
class _Case:
    """A kernel whose category is known.

    Attributes:
        shown: the detail of a check that succeeds.
        timed: whether the kernel is timed too.
        deadlines: deadlines of phases in seconds.
        lacks: the reason to skip the kernel on this host, or empty.
    """

    name: str
    kernel: str
    shown: str = "compiled and ran"
    backend: str = "torch"
    expected: Category = Category.PASSED
    problem: str = _PROBLEM
    timed: bool = False
    deadlines: tuple[tuple[str, float], ...] = ()
    lacks: str = ""


def _cases(tools: Collection[str], *, on_gpu: bool) -> Iterator[_Case]:
    agree = "products, convolution, norms, sorting and sums agree with the host's in float64"
    yield _Case("torch", _RIGHT, "a correct kernel passed", timed=True)
    yield _Case("wrong kernel", _WRONG, "was detected", expected=Category.WRONG_VALUES)
    deadlines = (("check_s", 2.0),)
    yield _Case("endless kernel", _ENDLESS, "was ended at its deadline", expected=Category.TIMEOUT, deadlines=deadlines)
    yield _Case("seed", _WEIGHTS, "both models drew the same weights", problem=_problem(_WEIGHTS, "64, 64"))
    yield _Case("operations", _ON_HOST, agree, problem=_problem(_kernel(_OPERATIONS), "128, 128"))
    lacks = "" if find_spec("triton") else "triton is not installed"
    yield _Case("triton kernel", _TRITON, backend="triton", lacks=lacks)
    yield _Case("c++ kernel", _CPP, backend="cpp", lacks="" if "ninja" in tools else "there is no ninja")
    if on_gpu:
        lacks = "" if {"nvcc", "ninja"} <= set(tools) else "there is no nvcc or no ninja"
        yield _Case("cuda kernel", _CUDA, backend="cuda", lacks=lacks)
        lacks = "" if find_spec("cupy") else "cupy is not installed"
        yield _Case("cupy kernel", _CUPY, backend="cupy", lacks=lacks)


def judged(config: Config, tools: Collection[str]) -> Iterator[tuple[str, Result]]:
    """Judge known kernels on each GPU that the settings select, or else on the CPU.

    ``tools`` names the installed ones of ``nvcc`` and ``ninja``.
    """
    for device in choose(config.gpus, devices(), os.environ.get("CUDA_VISIBLE_DEVICES")) or [None]:
        location = "cpu" if device is None else f"gpu {device.index}"
        begun = time.monotonic()
        try:
            with LocalJudge("cpu" if device is None else device.uuid, config=config) as judge:
                took_s = time.monotonic() - begun
                yield location, Result(f"ready in {took_s:.1f} s, isolation {judge.machine.isolation}")
                for case in _cases(tools, on_gpu=device is not None):
                    yield f"{location}: {case.name}", _judged(case, judge)
                if judge.doubts:
                    fix = "see docs/gpu-health.md, and drain the GPU if this comes back"
                    yield f"{location}: suspect GPU", Result("; ".join(judge.doubts), fix, State.FAIL)
        except JudgeUnavailable as error:
            yield location, Result(str(error), "fix the failed checks above", State.FAIL)


def _judged(case: _Case, judge: LocalJudge) -> Result:
    if case.lacks:
        return Result(f"skipped: {case.lacks}", state=State.INFO)
    begun = time.monotonic()
    purpose = "rank" if case.timed else "check"
    settings = {"checks": 2, "timing": {"purpose": purpose, "calls": 20}, "deadlines": dict(case.deadlines)}
    outcome = judge(problem=case.problem, kernel=case.kernel, backend=case.backend, settings=settings)
    took = f"in {time.monotonic() - begun:.1f} s"
    if outcome.category is case.expected:
        timed = f", timed at {outcome.runtime_ms:.4f} ms" if outcome.runtime_ms is not None else ""
        return Result(f"{case.shown} {took}{timed}")
    detail = f"{outcome.category} {took}, not {case.expected}: {outcome.message}"
    ending = one_line(outcome.log.strip()[-300:])
    return Result(detail, f"end of its log: {ending}" if ending else "", State.FAIL)
