"""A kernel for Triton's interpreter, read from its file when it is decorated."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl


@triton.jit
def _double(x, y, n, block: tl.constexpr) -> None:
    offsets = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(y + offsets, 2 * tl.load(x + offsets, mask=offsets < n), mask=offsets < n)


def doubles() -> bool:
    x = torch.arange(100.0)
    y = torch.empty_like(x)
    _double[(2,)](x, y, 100, block=64)
    return bool(torch.equal(y, 2 * x))
