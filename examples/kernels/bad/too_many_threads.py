"""Launches blocks of 2048 threads; the limit is 1024."""

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
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i];
}

at::Tensor gelu(const at::Tensor& x) {
    at::Tensor out = at::empty_like(x);
    const int n = x.numel();
    kernel<<<(n + 2047) / 2048, 2048, 0, c10::cuda::getCurrentCUDAStream()>>>(
        x.const_data_ptr<float>(), out.mutable_data_ptr<float>(), n);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return out;
}
"""

module = load_inline(
    name="too_many_threads",
    cpp_sources=BINDING,
    cuda_sources=SOURCE,
    functions=["gelu"],
    no_implicit_headers=True,
)


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return module.gelu(x)
