"""An upsampling convolution whose values are clamped, scaled, clamped again and divided."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, scale: float):
        super().__init__()
        self.conv = nn.ConvTranspose2d(channels_in, channels_out, 3, stride=2, padding=1, output_padding=1)
        self.bias = nn.Parameter(torch.randn(channels_out, 1, 1))
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.clamp(self.conv(x) + self.bias, 0.0, 1.0)
        return torch.clamp(x * self.scale, 0.0, 1.0) / self.scale


def get_inputs():
    return [torch.rand(128, 64, 128, 128)]


def get_init_inputs():
    return [64, 64, 2.0]
