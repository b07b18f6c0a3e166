"""A kernel that does not end: it waits for a value that nobody writes (here: for two billion reads)."""

import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    turns = 0
    while (tl.load(out_ptr, volatile=True) == 0.0) & (turns < 2000000000):
        turns += 1
    tl.store(out_ptr + offsets, x + turns, mask=mask)


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        block = 1024
        kernel[(triton.cdiv(x.numel(), block),)](x, out, x.numel(), BLOCK=block)
        return out
