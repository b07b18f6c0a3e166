"""A large input: 32 million elements, 128 MB in fp32, where only memory bandwidth counts."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, shift: float):
        super().__init__()
        self.shift = shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.shift)


def get_inputs():
    return [torch.rand(32 * 1024 * 1024)]


def get_init_inputs():
    return [-0.5]
