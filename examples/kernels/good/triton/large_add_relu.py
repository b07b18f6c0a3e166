"""Add and ReLU in one pass over 128 MB."""

import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def add_relu_kernel(x_ptr, out_ptr, shift, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, tl.maximum(x + shift, 0.0), mask=mask)


class ModelNew(nn.Module):
    def __init__(self, shift: float):
        super().__init__()
        self.shift = shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        add_relu_kernel[(triton.cdiv(x.numel(), 4096),)](x, out, self.shift, x.numel(), BLOCK=4096, num_warps=8)
        return out
