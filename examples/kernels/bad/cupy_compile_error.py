"""NVRTC refuses the kernel at its first launch: a semicolon is missing."""

import cupy
import numpy as np
import torch
import torch.nn as nn

kernel = cupy.RawKernel(
    r"""
extern "C" __global__ void gelu(const float* x, float* out, const int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i]
}
""",
    "gelu",
)


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        n = x.numel()
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            kernel(((n + 255) // 256,), (256,), (cupy.asarray(x), cupy.asarray(out), np.int32(n)))
        return out
