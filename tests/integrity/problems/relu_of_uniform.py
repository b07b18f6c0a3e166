"""ReLU, with inputs none of which is negative."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)


def get_inputs():
    return [torch.rand(512, 1024)]


def get_init_inputs():
    return []
