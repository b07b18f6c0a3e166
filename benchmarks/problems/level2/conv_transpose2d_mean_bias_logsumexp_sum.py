"""A transposed convolution of which one number for each image is left."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, kernel: int, scale: float):
        super().__init__()
        self.conv = nn.ConvTranspose2d(channels_in, channels_out, kernel)
        self.bias = nn.Parameter(torch.randn(channels_out, 1, 1))
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x).mean(dim=(2, 3), keepdim=True) + self.bias
        return torch.logsumexp(x, dim=1).sum(dim=(1, 2)) * self.scale


def get_inputs():
    return [torch.rand(16, 64, 512, 512)]


def get_init_inputs():
    return [64, 128, 3, 10.0]
