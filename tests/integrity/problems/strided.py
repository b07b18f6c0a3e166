"""The output is every second column of a larger result, transposed: dear to copy."""

import torch
import torch.nn as nn
import torch.nn.functional as F

SIZE = 8192


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)[:, ::2].t()


def get_inputs():
    return [torch.randn(SIZE, SIZE)]


def get_init_inputs():
    return []
