"""Needs over 64 registers a thread and launches 1024 threads a block: CUDA error 701."""

import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

# Slim headers: nvcc needs seconds where torch/extension.h takes it half a minute.
BINDING = r"""
#include <ATen/core/Tensor.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

at::Tensor gelu(const at::Tensor& x);
"""

SOURCE = r"""
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

__global__ void kernel(const float* x, float* out, int n) {
    // 128 values that must all be alive at once; 65536 registers give 1024 threads 64 each.
    float live[128];
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
#pragma unroll
    for (int j = 0; j < 128; ++j) live[j] = x[(i + j * 977) % n];
    for (int turn = 0; turn < 4; ++turn) {
#pragma unroll
        for (int j = 0; j < 128; ++j) live[j] = live[j] * live[(j + 37) % 128] + live[(j + 91) % 128];
    }
    float total = 0.0f;
#pragma unroll
    for (int j = 0; j < 128; ++j) total += live[j];
    if (i < n) out[i] = total;
}

at::Tensor gelu(const at::Tensor& x) {
    at::Tensor out = at::empty_like(x);
    const int n = x.numel();
    kernel<<<(n + 1023) / 1024, 1024, 0, c10::cuda::getCurrentCUDAStream()>>>(
        x.const_data_ptr<float>(), out.mutable_data_ptr<float>(), n);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return out;
}
"""

module = load_inline(
    name="too_many_registers",
    cpp_sources=BINDING,
    cuda_sources=SOURCE,
    functions=["gelu"],
    no_implicit_headers=True,
)


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return module.gelu(x)
