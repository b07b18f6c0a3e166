"""Several outputs: the largest value of every row, and its index (int64)."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = torch.max(x, dim=-1)
        return values, indices


def get_inputs():
    return [torch.randn(256, 1024)]


def get_init_inputs():
    return []
