"""The mean of every column, written to each of its places."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(dim=0, keepdim=True) + torch.zeros_like(x)


def get_inputs():
    return [torch.randn(512, 1024)]


def get_init_inputs():
    return []
