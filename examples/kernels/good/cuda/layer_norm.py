"""LayerNorm: a warp a row, the weights of `nn.LayerNorm` handed to the kernel."""

import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

__device__ float warp_sum(float value) {
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
}

__global__ void layer_norm_kernel(const float* __restrict__ x, const float* __restrict__ weight,
                                  const float* __restrict__ bias, float* __restrict__ out, int rows, int columns,
                                  float eps) {
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    const float* src = x + (size_t)row * columns;
    float* dst = out + (size_t)row * columns;
    float sum = 0.0f;
    for (int i = lane; i < columns; i += 32) sum += src[i];
    const float mean = warp_sum(sum) / columns;
    float squares = 0.0f;
    for (int i = lane; i < columns; i += 32) squares += (src[i] - mean) * (src[i] - mean);
    const float scale = rsqrtf(warp_sum(squares) / columns + eps);
    for (int i = lane; i < columns; i += 32) dst[i] = (src[i] - mean) * scale * weight[i] + bias[i];
}

torch::Tensor layer_norm_cuda(torch::Tensor x, torch::Tensor weight, torch::Tensor bias, double eps) {
    auto in = x.contiguous();
    auto out = torch::empty_like(in);
    const int rows = in.size(0), columns = in.size(1);
    layer_norm_kernel<<<(rows + 3) / 4, 128, 0, c10::cuda::getCurrentCUDAStream()>>>(
        in.data_ptr<float>(), weight.data_ptr<float>(), bias.data_ptr<float>(), out.data_ptr<float>(), rows, columns,
        static_cast<float>(eps));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return out;
}
"""

module = load_inline(
    name="layer_norm_cuda_module",
    cpp_sources="torch::Tensor layer_norm_cuda(torch::Tensor x, torch::Tensor weight, torch::Tensor bias, double eps);",
    cuda_sources=SOURCE,
    functions=["layer_norm_cuda"],
)


class ModelNew(nn.Module):
    def __init__(self, features: int):
        super().__init__()
        self.norm = nn.LayerNorm(features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return module.layer_norm_cuda(x, self.norm.weight, self.norm.bias, self.norm.eps)
