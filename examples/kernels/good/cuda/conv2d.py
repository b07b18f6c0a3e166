"""A direct 3x3 convolution: one thread an output element."""

import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

__global__ void conv2d_kernel(const float* __restrict__ x, const float* __restrict__ weight,
                              const float* __restrict__ bias, float* __restrict__ out, int batch, int in_channels,
                              int out_channels, int height, int width) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= batch * out_channels * height * width) return;
    const int column = i % width, row = i / width % height;
    const int channel = i / (width * height) % out_channels, image = i / (width * height * out_channels);
    float total = bias[channel];
    for (int c = 0; c < in_channels; ++c) {
        const float* plane = x + (size_t)(image * in_channels + c) * height * width;
        const float* taps = weight + (channel * in_channels + c) * 9;
        for (int dy = -1; dy <= 1; ++dy) {
            for (int dx = -1; dx <= 1; ++dx) {
                const int y = row + dy, z = column + dx;
                if (y >= 0 && y < height && z >= 0 && z < width) {
                    total += plane[y * width + z] * taps[(dy + 1) * 3 + dx + 1];
                }
            }
        }
    }
    out[i] = total;
}

torch::Tensor conv2d_cuda(torch::Tensor x, torch::Tensor weight, torch::Tensor bias) {
    auto in = x.contiguous();
    auto taps = weight.contiguous();
    const int batch = in.size(0), in_channels = in.size(1), height = in.size(2), width = in.size(3);
    const int out_channels = taps.size(0);
    auto out = torch::empty({batch, out_channels, height, width}, in.options());
    const int size = out.numel();
    conv2d_kernel<<<(size + 127) / 128, 128, 0, c10::cuda::getCurrentCUDAStream()>>>(
        in.data_ptr<float>(), taps.data_ptr<float>(), bias.data_ptr<float>(), out.data_ptr<float>(), batch,
        in_channels, out_channels, height, width);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return out;
}
"""

module = load_inline(
    name="conv2d_cuda_module",
    cpp_sources="torch::Tensor conv2d_cuda(torch::Tensor x, torch::Tensor weight, torch::Tensor bias);",
    cuda_sources=SOURCE,
    functions=["conv2d_cuda"],
)


class ModelNew(nn.Module):
    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return module.conv2d_cuda(x, self.conv.weight, self.conv.bias)
