"""Honest: sums by atomic additions, whose order and last bits differ from call to call.

Looks like a race and is none: memory is cleared first, and fp32 additions in any order lie within the tolerance. Two
runs on one input need not agree in every bit. It must pass.
"""

import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def partial_sum(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    offsets = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + offsets, mask=offsets < columns, other=0.0)
    tl.atomic_add(out_ptr + row, tl.sum(x, axis=0))


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape
        out = torch.zeros(rows, dtype=x.dtype, device=x.device)
        partial_sum[(rows, triton.cdiv(columns, 256))](x, out, columns, BLOCK=256)
        return out
