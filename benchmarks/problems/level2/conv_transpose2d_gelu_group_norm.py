"""A transposed convolution, GELU, and a normalisation of groups of channels."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, kernel: int, groups: int):
        super().__init__()
        self.conv = nn.ConvTranspose2d(channels_in, channels_out, kernel)
        self.norm = nn.GroupNorm(groups, channels_out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(F.gelu(self.conv(x)))


def get_inputs():
    return [torch.rand(128, 64, 256, 256)]


def get_init_inputs():
    return [64, 64, 3, 8]
