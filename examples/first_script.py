"""A first script, which judges one kernel. Start a fleet with `kqueue up` in another terminal, then run this."""

import sys

from kqueue import Client, KqueueError

REFERENCE = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x):
        return torch.softmax(x, dim=-1)


def get_inputs():
    return [torch.randn(8, 1000)]


def get_init_inputs():
    return []
"""

KERNEL = """
import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def softmax_kernel(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < columns
    x = tl.load(x_ptr + row * columns + offsets, mask=mask, other=-float("inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + row * columns + offsets, e / tl.sum(e, axis=0), mask=mask)


class ModelNew(nn.Module):
    def forward(self, x):
        rows, columns = x.shape
        out = torch.empty_like(x)
        softmax_kernel[(rows,)](x, out, columns, BLOCK=triton.next_power_of_2(columns))
        return out
"""

try:
    with Client() as kq:
        verdict = kq.evaluate(problem=REFERENCE, kernel=KERNEL, backend="triton")
except KqueueError as error:  # no fleet runs, for instance
    sys.exit(f"{error}")

print(f"{verdict.category}: {verdict.message or 'the kernel agrees with its reference'}")
if verdict.passed and verdict.speedup is not None:
    print(f"{verdict.runtime_ms:.4f} ms, the reference {verdict.baseline_ms:.4f} ms: {verdict.speedup:.2f}x")
