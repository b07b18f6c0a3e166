"""An upsampling convolution in three dimensions, bounded from below and divided."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, least: float, divisor: float):
        super().__init__()
        self.conv = nn.ConvTranspose3d(channels_in, channels_out, 3, stride=2, padding=1)
        self.least = least
        self.divisor = divisor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.clamp(self.conv(x), min=self.least) / self.divisor


def get_inputs():
    return [torch.rand(16, 64, 24, 48, 48)]


def get_init_inputs():
    return [64, 128, -1.0, 2.0]
