"""GELU in one pass over memory."""

import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def gelu_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    # 0.5 * (1 + tanh(z)) is sigmoid(2 z)
    y = x * tl.sigmoid(x * (1.5957691216057308 + 0.07135481282553499 * x * x))
    tl.store(out_ptr + offsets, y, mask=mask)


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        # The interpreter's cost is per program, a GPU's per element.
        block = 1024 if x.is_cuda else 65536
        gelu_kernel[(triton.cdiv(x.numel(), block),)](x, out, x.numel(), BLOCK=block)
        return out
