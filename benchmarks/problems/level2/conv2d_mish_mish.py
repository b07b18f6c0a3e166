"""A convolution, and Mish twice."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, kernel: int):
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels_out, kernel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.mish(F.mish(self.conv(x)))


def get_inputs():
    return [torch.rand(64, 64, 256, 256)]


def get_init_inputs():
    return [64, 128, 3]
