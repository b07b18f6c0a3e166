"""cuBLAS for the product, one hand-written kernel for bias and ReLU together."""

import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

__global__ void bias_relu_kernel(float* out, const float* __restrict__ bias, int columns, int size) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < size) out[i] = fmaxf(out[i] + bias[i % columns], 0.0f);
}

void bias_relu_cuda(torch::Tensor out, torch::Tensor bias) {
    const int size = out.numel();
    bias_relu_kernel<<<(size + 255) / 256, 256, 0, c10::cuda::getCurrentCUDAStream()>>>(
        out.data_ptr<float>(), bias.data_ptr<float>(), out.size(-1), size);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}
"""

module = load_inline(
    name="linear_relu_cuda_module",
    cpp_sources="void bias_relu_cuda(torch::Tensor out, torch::Tensor bias);",
    cuda_sources=SOURCE,
    functions=["bias_relu_cuda"],
)


class ModelNew(nn.Module):
    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.mm(x, self.linear.weight.t())
        module.bias_relu_cuda(out, self.linear.bias)
        return out
