"""Add and ReLU over 128 MB, four elements a thread."""

import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

__global__ void add_relu_kernel(const float4* __restrict__ x, float4* __restrict__ out, float shift, size_t quads) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < quads) {
        const float4 v = x[i];
        out[i] = make_float4(fmaxf(v.x + shift, 0.0f), fmaxf(v.y + shift, 0.0f), fmaxf(v.z + shift, 0.0f),
                             fmaxf(v.w + shift, 0.0f));
    }
}

torch::Tensor add_relu_cuda(torch::Tensor x, double shift) {
    auto in = x.contiguous();
    TORCH_CHECK(in.numel() % 4 == 0, "expects a multiple of four elements");
    auto out = torch::empty_like(in);
    const size_t quads = in.numel() / 4;
    add_relu_kernel<<<(quads + 255) / 256, 256, 0, c10::cuda::getCurrentCUDAStream()>>>(
        reinterpret_cast<const float4*>(in.data_ptr<float>()), reinterpret_cast<float4*>(out.data_ptr<float>()),
        static_cast<float>(shift), quads);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return out;
}
"""

module = load_inline(
    name="large_add_relu_cuda_module",
    cpp_sources="torch::Tensor add_relu_cuda(torch::Tensor x, double shift);",
    cuda_sources=SOURCE,
    functions=["add_relu_cuda"],
)


class ModelNew(nn.Module):
    def __init__(self, shift: float):
        super().__init__()
        self.shift = shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return module.add_relu_cuda(x, self.shift)
