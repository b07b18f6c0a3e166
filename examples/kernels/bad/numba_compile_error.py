"""Numba refuses the kernel at its first launch: a number and a text cannot be added."""

import torch
import torch.nn as nn
from numba import cuda


@cuda.jit
def gelu_kernel(x, out):
    i = cuda.grid(1)
    if i < x.size:
        out[i] = x[i] + "one"


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        stream = cuda.external_stream(torch.cuda.current_stream().cuda_stream)
        gelu_kernel[(x.numel() + 255) // 256, 256, stream](x.view(-1), out.view(-1))
        return out
