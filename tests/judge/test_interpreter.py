"""Triton's kernels on a CPU slot, where Triton's interpreter runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kqueue.categories import Blame, Category
from kqueue.contract import Outcome, Request, Settings, Timing
from tests.judge.linear import WAIT
from tests.judge.rig import Rig
from tests.judge.sources import problem
from workers.judge.candidate import failures, harness, interpreter
from workers.judge.channel.orders import Order
from workers.judge.channel.protocol import Tag
from workers.judge.channel.wire import Command

_TOP = """
import torch, triton
import triton.language as tl

@triton.jit
def total(x_ptr, out_ptr, SIZE: tl.constexpr):
    row = tl.program_id(0)
    x = tl.load(x_ptr + row * SIZE + tl.arange(0, SIZE))
    tl.store(out_ptr + row, tl.sum(x, axis=0))
"""
_MODEL = """
class ModelNew(torch.nn.Module):
    def forward(self, x):
        out = x.new_empty(x.shape[0])
        total[(x.shape[0],)](x, out, SIZE=x.shape[1])
        return out
"""
_MISSING = """
import mmap, sys
from workers.judge.candidate import harness, interpreter
harness.preload()
before = set(sys.modules)
interpreter.install(memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q"))
print(*(set(sys.modules) - before))
"""
SUMS = problem("x: x.sum(-1)", "return [torch.rand(4, 64)]")


def judge(rig: Rig, kernel: str, reference: str = SUMS, **settings: object) -> Outcome:
    made = Settings.model_validate({"checks": 2, "timing": {"calls": 5, "warmup": 0}, **settings})
    return rig.judge(Request(problem=reference, kernel=kernel, backend="triton", settings=made))


def test_a_fork_server_imports_what_its_processes_need() -> None:
    """A sealed process of a CPU slot imports no module when it opens its device."""
    environment = os.environ | {interpreter.VARIABLE: "1"}
    done = subprocess.run([sys.executable, "-c", _MISSING], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_kernel_is_checked_and_not_timed_unless_asked_for(rig: Rig) -> None:
    outcome = judge(rig, _TOP + _MODEL)
    assert (outcome.category, outcome.runtime, outcome.baseline) == (Category.PASSED, None, None), outcome.message
    assert outcome.message.endswith(
        "hidden variants, random each time; not timed: Triton's interpreter runs on the CPU"
    )
    assert outcome.evidence.checks is not None
    assert outcome.evidence.checks > 2
    assert outcome.log == ""
    slow = _MODEL.replace("return out", f"{WAIT}\n        return out")
    waiting = problem(f"x: ({WAIT}, x.sum(-1))[1]", "return [torch.rand(4, 64)]")
    timed = judge(rig, _TOP + slow, waiting, timing=Timing(calls=5, warmup=0, interpreter=True))
    assert timed.speedup is not None, timed.message
    assert timed.evidence.untimed is None


#: What the interpreter must do as a GPU does. It runs in the candidate, where the interpreter is corrected.
_AGREEMENTS = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra import libdevice

@triton.jit
def narrow(x_ptr, y_ptr, out_ptr, sums_ptr, scan_ptr, small_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(out_ptr + at, tl.where(x > y, x * y + 1, -x))
    tl.atomic_add(sums_ptr + at % 2, tl.full([SIZE], 0.5, tl.bfloat16))
    tl.store(scan_ptr + at, tl.cumsum(x, 0) + x.sum().to(tl.bfloat16) + (x > 0.5).to(tl.bfloat16) + at.to(tl.bfloat16))
    tl.store(small_ptr + at, (x * 1000).to(tl.float8e4nv))

@triton.jit
def odd(x_ptr):
    tl.load(x_ptr + tl.arange(0, 3))

@triton.autotune([triton.Config({"SIZE": size}) for size in (3, 64, 128)], key=[])
@triton.jit
def tuned(x_ptr, out_ptr, SIZE: tl.constexpr):
    tl.static_assert(SIZE > 3)
    tl.store(out_ptr + tl.arange(0, SIZE), tl.load(x_ptr + tl.arange(0, SIZE)) + SIZE)

@gluon.jit
def laid_out(x_ptr):
    gl.load(x_ptr + gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [2], [0])))

@triton.jit
def error_function(x_ptr):
    tl.store(x_ptr, libdevice.erf(tl.load(x_ptr).to(tl.float32)))

def agree():
    x, y = torch.rand(64).bfloat16(), torch.rand(64).bfloat16()
    out, scan, sums, small = torch.empty_like(x), torch.empty_like(x), torch.zeros(2).bfloat16(), torch.empty(64)
    small = small.to(torch.float8_e4m3fn)
    narrow[(1,)](x, y, out, sums, scan, small, SIZE=64)
    torch.testing.assert_close(out, torch.where(x > y, x * y + 1, -x), rtol=0, atol=0)
    assert sums.tolist() == [16, 16], sums
    torch.testing.assert_close(scan, x.cumsum(0) + x.sum() + (x > 0.5).bfloat16() + torch.arange(64).bfloat16())
    assert torch.equal(small.float(), (x * 1000).clamp(max=448).to(torch.float8_e4m3fn).float())
    tuned[(1,)](x, out)
    torch.testing.assert_close(out, x + 64, rtol=0, atol=0)
    assert triton.runtime.driver.active.get_current_target().backend == "cuda"
    for error, words, launch in (
        ("CompilationError", "power of 2", lambda: odd[(1,)](x)),
        ("KeyError", "num_wraps", lambda: tuned.fn[(1,)](x, out, SIZE=64, num_wraps=4)),
        ("NeedsGpuError", "without a GPU", lambda: triton.runtime.driver.active.utils),
        ("NeedsGpuError", "Gluon", lambda: laid_out[(1,)](x, num_warps=2)),
        ("NeedsGpuError", "cannot run this kernel", lambda: error_function[(1,)](x)),
    ):
        try:
            launch()
        except Exception as raised:
            assert (type(raised).__name__, words in str(raised)) == (error, True), repr(raised)
        else:
            raise AssertionError(words)

agree()
agree()
"""


def test_a_kernel_is_compiled_and_computes_as_on_a_gpu(rig: Rig) -> None:
    """Narrow numbers, an autotuner, and errors that only a compiler knows, before and after a launch."""
    outcome = judge(rig, _TOP + _AGREEMENTS + _MODEL)
    assert outcome.category is Category.PASSED, outcome.message + outcome.log
    broken = judge(rig, (_TOP + _MODEL).replace("tl.sum(x, axis=0)", "tl.tanh(x)"))
    assert (broken.category, broken.facts.exception) == (
        Category.COMPILE_ERROR,
        "triton.compiler.errors.CompilationError",
    )
    assert broken.message.startswith("line "), broken.message
    assert "has no attribute 'tanh'" in broken.message.partition("\n")[0]
    for grid, category in (("[x.shape[0]]", Category.PASSED), ("(x.shape[0] / 1,)", Category.RUNTIME_ERROR)):
        launched = judge(rig, _TOP + _MODEL.replace("(x.shape[0],)", grid))
        assert launched.category is category, launched.message


def test_what_only_a_gpu_can_show_blames_nobody(rig: Rig) -> None:
    """A wrong answer after rounding to a narrow dtype, parts that the interpreter lacks, slow calls, and a problem."""
    halved = (_TOP + _MODEL).replace("tl.sum(x, axis=0)", "tl.sum(x, axis=0) / 2")
    assert judge(rig, halved).category is Category.WRONG_VALUES
    doubted = judge(rig, halved, precision="bf16")
    assert (doubted.category, doubted.facts.instead_of) == (Category.NEEDS_GPU, Category.WRONG_VALUES)
    assert doubted.message.endswith(": judge it on a GPU")
    assert doubted.blame is Blame.NOBODY
    assembly = 'tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)'
    lacking = judge(rig, (_TOP + _MODEL).replace("tl.sum(x, axis=0)", f"tl.sum({assembly}, axis=0)"))
    assert (lacking.category, lacking.facts.instead_of) == (Category.NEEDS_GPU, Category.RUNTIME_ERROR)
    assert "inline_asm" in lacking.message
    slow = judge(rig, _TOP + _MODEL.replace("return out", "__import__('time').sleep(600)"), deadlines={"check_s": 2})
    assert (slow.category, slow.facts.instead_of) == (Category.NEEDS_GPU, Category.TIMEOUT), slow.message
    assert judge(rig, f"while True: pass\n{_TOP}{_MODEL}", deadlines={"load_s": 2}).category is Category.TIMEOUT
    asking = judge(rig, _TOP + _MODEL, problem("x: x.cuda().sum(-1)", "return [torch.rand(4, 64)]"))
    assert (asking.category, asking.facts.instead_of) == (Category.NEEDS_GPU, Category.REFERENCE_ERROR), asking.message


@pytest.mark.parametrize(
    ("statement", "tag"),
    [
        ("x.cuda()", Tag.NEEDS_GPU),
        ("torch.cuda.current_stream()", Tag.NEEDS_GPU),
        ("assert x.device.type == 'cuda'", Tag.NEEDS_GPU),
        ("if not x.is_cuda: raise ValueError('wrong device')", Tag.NEEDS_GPU),
        ("assert x.dim() == 3, 'no cuda'", Tag.OTHER),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_kernel_that_asks_for_a_gpu_is_told_from_others(tmp_path: Path, statement: str, tag: Tag) -> None:
    """An exception counts as such by its traceback, not by its text."""
    (tmp_path / "asking.py").write_text(f"import torch\nx = torch.ones(1)\n{statement}\n")
    with pytest.raises(Exception) as raised:
        harness.import_file(tmp_path / "asking.py")
    assert failures.reply_to(Command(Order.RUN, 1, 0, None, ()), raised.value, "", on_gpu=False).tag is tag
