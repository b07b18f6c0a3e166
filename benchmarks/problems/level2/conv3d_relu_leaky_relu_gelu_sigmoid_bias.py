"""A convolution in three dimensions, four activations, and a bias."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, kernel: int):
        super().__init__()
        self.conv = nn.Conv3d(channels_in, channels_out, kernel)
        self.bias = nn.Parameter(torch.randn(channels_out, 1, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.leaky_relu(F.relu(self.conv(x)), negative_slope=0.01)
        return torch.sigmoid(F.gelu(x)) + self.bias


def get_inputs():
    return [torch.rand(64, 8, 32, 64, 64)]


def get_init_inputs():
    return [8, 32, 3]
