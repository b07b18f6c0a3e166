"""An upsampling convolution in three dimensions, normalised along the width, GELU, and a factor."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, width: int, scale: float):
        super().__init__()
        self.conv = nn.ConvTranspose3d(channels_in, channels_out, 4, stride=2, padding=1)
        self.norm = nn.LayerNorm(width)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.norm(self.conv(x))) * self.scale


def get_inputs():
    return [torch.rand(32, 32, 16, 32, 32)]


def get_init_inputs():
    return [32, 64, 64, 1.5]
