"""Elementwise on 16 MB: larger than what caches give back for nothing, smaller than the L2 cache."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate="tanh")


def get_inputs():
    return [torch.randn(4096, 1024)]


def get_init_inputs():
    return []
