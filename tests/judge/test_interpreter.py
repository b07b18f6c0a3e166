"""Triton's kernels on a CPU slot, where Triton's interpreter runs them."""

from __future__ import annotations

from kqueue.categories import Category
from kqueue.contract import Backend, Outcome, Request, Settings, Timing
from tests.judge.rig import Rig
from tests.judge.sources import problem

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
SUMS = problem("x: x.sum(-1)", "return [torch.rand(4, 64)]")


def judge(rig: Rig, kernel: str, reference: str = SUMS, **settings: object) -> Outcome:
    made = Settings.model_validate({"checks": 2, "timing": {"calls": 5, "warmup": 0}, **settings})
    return rig.judge(Request(problem=reference, kernel=kernel, backend=Backend.TRITON, settings=made))


def test_a_kernel_is_checked_and_not_timed_unless_asked_for(rig: Rig) -> None:
    outcome = judge(rig, _TOP + _MODEL)
    assert (outcome.category, outcome.runtime, outcome.baseline) == (Category.PASSED, None, None), outcome.message
    assert outcome.message.endswith("hidden variants; not timed: Triton's interpreter runs on the CPU")
    assert outcome.evidence.checks is not None
    assert outcome.evidence.checks > 2
    timed = judge(rig, _TOP + _MODEL, timing=Timing(calls=5, warmup=0, interpreter=True))
    assert timed.speedup is not None, timed.message
    assert timed.evidence.untimed is None
