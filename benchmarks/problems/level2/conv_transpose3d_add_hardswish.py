"""An upsampling convolution, a second input added to it, and the sum times its own HardSwish."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self, channels_in: int, channels_out: int):
        super().__init__()
        self.conv = nn.ConvTranspose3d(channels_in, channels_out, 3, stride=2, padding=1, output_padding=1)

    def forward(self, x: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
        x = self.conv(x) + addend
        return x * F.hardswish(x)


def get_inputs():
    return [torch.rand(128, 32, 16, 16, 16), torch.rand(128, 64, 32, 32, 32)]


def get_init_inputs():
    return [32, 64]
