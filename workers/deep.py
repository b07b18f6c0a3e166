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
from typing import Any, Final

from kqueue.categories import Category
from kqueue.config import Config
from kqueue.contract import Backend
from kqueue.doctor import Check, State
from kqueue.errors import JudgeUnavailable
from kqueue.judging import LocalJudge
from kqueue.text import one_line
from workers.judge.gpu.devices import Device, choose, devices

_PROBLEM: Final = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1

def get_inputs():
    return [torch.randn(4096)]

def get_init_inputs():
    return []
"""
_RIGHT: Final = """
import torch

class ModelNew(torch.nn.Module):
    def forward(self, x):
        return x + x + 1
"""
_WRONG: Final = _RIGHT.replace("+ 1", "+ 1.1")
_ENDLESS: Final = _RIGHT.replace("return", "while True: pass\n        return")
_WEIGHTS: Final = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.0), torch.nn.Linear(64, 64))
    def forward(self, x):
        return self.layers(x)

def get_inputs():
    return [torch.randn(64, 64)]

def get_init_inputs():
    return []
"""
_SAME_WEIGHTS: Final = _WEIGHTS.split("def get_inputs")[0].replace("Model(", "ModelNew(")
_OPERATIONS: Final = """
import torch
import torch.nn.functional as F

class Model(torch.nn.Module):
    def forward(self, x):
        image = x.reshape(1, 4, 64, 64)
        return (
            x @ x[:128].T,
            F.conv2d(image, image[:, :, :3, :3]),
            F.layer_norm(x, (128,)),
            torch.softmax(x, 1),
            torch.sort(x, 1).values,
            torch.cumsum(x, 0),
            x.amax(0),
        )

def get_inputs():
    return [torch.randn(128, 128)]

def get_init_inputs():
    return []
"""
#: The same operations on the CPU in float64.
_ON_HOST: Final = (
    _OPERATIONS.split("def get_inputs")[0]
    .replace("Model(", "ModelNew(")
    .replace("forward(self, x):", "forward(self, given):\n        x = given.cpu().double()")
    .replace("return (", "answers = (")
    + "        return tuple(answer.float().to(given.device) for answer in answers)\n"
)
_TRITON: Final = """
import torch
import triton
import triton.language as tl

@triton.jit
def kernel(x, out, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place, tl.load(x + place, mask=place < n) * 2 + 1, mask=place < n)

class ModelNew(torch.nn.Module):
    def forward(self, x):
        out = torch.empty_like(x)
        kernel[(triton.cdiv(x.numel(), 256),)](x, out, x.numel(), BLOCK=256)
        return out
"""
_CPP: Final = """
import torch
from torch.utils.cpp_extension import load_inline

built = load_inline("deep_cpp", cpp_sources="torch::Tensor f(torch::Tensor x) { return x * 2 + 1; }", functions=["f"])

class ModelNew(torch.nn.Module):
    def forward(self, x):
        return built.f(x)
"""
_CUDA: Final = '''
import torch
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

class ModelNew(torch.nn.Module):
    def forward(self, x):
        return built.f(x)
'''
_CUPY: Final = """
import cupy
import torch

kernel = cupy.RawKernel(r'''
extern "C" __global__ void f(const float* x, float* out, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] * 2 + 1;
}''', "f")

class ModelNew(torch.nn.Module):
    def forward(self, x):
        out = torch.empty_like(x)
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            kernel(((x.numel() + 255) // 256,), (256,), (x.data_ptr(), out.data_ptr(), x.numel()))
        return out
"""


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
    problem: str
    kernel: str
    backend: Backend
    expected: Category
    shown: str
    timed: bool = False
    deadlines: tuple[tuple[str, float], ...] = ()
    lacks: str = ""

    @property
    def settings(self) -> dict[str, Any]:
        """The request's settings."""
        timing = {"enabled": self.timed, "calls": 20}
        return {"checks": 2, "timing": timing, "deadlines": dict(self.deadlines)}


def _cases(tools: Collection[str], *, on_gpu: bool) -> list[_Case]:
    passed = Category.PASSED
    cases = [
        _Case("torch", _PROBLEM, _RIGHT, Backend.TORCH, passed, "a correct kernel passed", timed=True),
        _Case("wrong kernel", _PROBLEM, _WRONG, Backend.TORCH, Category.WRONG_VALUES, "was detected"),
        _Case("endless kernel", _PROBLEM, _ENDLESS, Backend.TORCH, Category.TIMEOUT, "was ended at its deadline",
               deadlines=(("check_s", 2.0),)),
        _Case("seed", _WEIGHTS, _SAME_WEIGHTS, Backend.TORCH, passed, "both models drew the same weights"),
        _Case("operations", _OPERATIONS, _ON_HOST, Backend.TORCH, passed,
               "products, convolution, norms, sorting and sums agree with the host's in float64"),
        _Case("triton kernel", _PROBLEM, _TRITON, Backend.TRITON, passed, "compiled and ran",
               lacks="" if find_spec("triton") else "triton is not installed"),
        _Case("c++ kernel", _PROBLEM, _CPP, Backend.CPP, passed, "compiled and ran",
               lacks="" if "ninja" in tools else "there is no ninja"),
    ]  # fmt: skip
    if on_gpu:
        cases += [
            _Case("cuda kernel", _PROBLEM, _CUDA, Backend.CUDA, passed, "compiled and ran",
                   lacks="" if {"nvcc", "ninja"} <= set(tools) else "there is no nvcc or no ninja"),
            _Case("cupy kernel", _PROBLEM, _CUPY, Backend.CUPY, passed, "compiled and ran",
                   lacks="" if find_spec("cupy") else "cupy is not installed"),
        ]  # fmt: skip
    return cases


def judged(config: Config, tools: Collection[str]) -> Iterator[Check]:
    """Judge known kernels on each GPU that the settings select, or else on the CPU.

    ``tools`` names the installed ones of ``nvcc`` and ``ninja``.
    """
    selected = choose(config.gpus, devices(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    for device in selected or [None]:
        yield from _on(device, config, tools)


def _on(device: Device | None, config: Config, tools: Collection[str]) -> Iterator[Check]:
    location = "cpu" if device is None else f"gpu {device.index}"
    begun = time.monotonic()
    try:
        with LocalJudge("cpu" if device is None else device.uuid, config=config) as judge:
            took_s = time.monotonic() - begun
            detail = f"ready in {took_s:.1f} s, isolation {judge.machine.isolation}"
            yield Check("judge", location, State.OK, detail)
            for case in _cases(tools, on_gpu=device is not None):
                yield _judged(case, judge, location)
            if judge.doubts:
                fix = "see docs/gpu-health.md, and drain the GPU if this comes back"
                yield Check("judge", f"{location}: suspect GPU", State.FAIL, "; ".join(judge.doubts), fix)
    except JudgeUnavailable as error:
        yield Check("judge", location, State.FAIL, str(error), "fix the failed checks above")


def _judged(case: _Case, judge: LocalJudge, location: str) -> Check:
    name = f"{location}: {case.name}"
    if case.lacks:
        return Check("judge", name, State.INFO, f"skipped: {case.lacks}")
    begun = time.monotonic()
    outcome = judge(problem=case.problem, kernel=case.kernel, backend=case.backend, settings=case.settings)
    took = f"in {time.monotonic() - begun:.1f} s"
    if outcome.category is case.expected:
        timed = f", timed at {outcome.runtime_ms:.4f} ms" if outcome.runtime_ms is not None else ""
        return Check("judge", name, State.OK, f"{case.shown} {took}{timed}")
    detail = f"{outcome.category} {took}, not {case.expected}: {outcome.message}"
    ending = one_line(outcome.log.strip()[-300:])
    return Check("judge", name, State.FAIL, detail, f"end of its log: {ending}" if ending else "")
