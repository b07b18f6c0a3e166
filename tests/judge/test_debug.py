"""Debug switches of an evaluation, on a CPU slot."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from kqueue.categories import Category
from kqueue.contract import Debug, Request, Settings, Timing
from tests.judge.rig import Rig
from tests.judge.sources import problem

PROBLEM = problem("x: x + 1", "return [torch.rand(64)]")
KERNEL = """
import os, torch, triton
import triton.language as tl

@triton.jit
def add_one(x_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x = tl.load(x_ptr + at)
    tl.device_assert(x > 1, "too small")
    tl.store(out_ptr + at, x + 1)

class ModelNew(torch.nn.Module):
    def forward(self, x):
        print("debug", triton.knobs.runtime.debug)
        out = torch.empty_like(x)
        add_one[(1,)](x, out, SIZE=64)
        return out
"""


def judge(rig: Rig, kernel: str = KERNEL, backend: str = "triton", **switches: bool) -> tuple[Category, str]:
    settings = Settings(checks=1, timing=Timing().off(), debug=Debug(**switches))
    outcome = rig.judge(Request(problem=PROBLEM, kernel=kernel, backend=backend, settings=settings))
    return outcome.category, outcome.log


def test_assertions_are_checked_where_they_are_asked_for(rig: Rig) -> None:
    category, log = judge(rig, device_asserts=True)
    assert category is Category.RUNTIME_ERROR
    assert "too small" in log
    assert "debug True" in log
    category, log = judge(rig)
    assert category is Category.PASSED
    assert "debug False" in log


def test_nothing_is_timed_under_a_switch() -> None:
    for switch in Debug.model_fields:
        debug = Debug(**{switch: True})
        with pytest.raises(ValidationError, match="--no-timing"):
            Settings(debug=debug)
        assert Settings(debug=debug, timing=Timing().off()).debug == debug
