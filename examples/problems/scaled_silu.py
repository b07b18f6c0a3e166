"""With gradients: SiLU of a scaled input, whose kernel needs a backward too."""

import torch
import torch.nn as nn
import torch.nn.functional as F

BACKWARD = True


class Model(nn.Module):
    def __init__(self, features: int):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(features) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x * self.scale)


def get_inputs():
    return [torch.randn(128, 256)]


def get_init_inputs():
    return [256]
