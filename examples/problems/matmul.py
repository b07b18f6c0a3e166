"""A product of two square matrices."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b


def get_inputs():
    return [torch.rand(256, 256), torch.rand(256, 256)]


def get_init_inputs():
    return []
