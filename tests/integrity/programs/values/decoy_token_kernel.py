"""Launches a kernel of its own on 16 values, and has torch do all the rest.

A rule that asks for one launch of an own kernel is satisfied. The share of GPU time in own kernels is not: the
verdict's provenance gives it, and by policy a small one is refused.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl


@triton.jit
def gelu_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    y = x * tl.sigmoid(x * (1.5957691216057308 + 0.07135481282553499 * x * x))
    tl.store(out_ptr + offsets, y, mask=mask)


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.gelu(x, approximate="tanh")
        gelu_kernel[(1,)](x, out, 16, BLOCK=16)
        return out
