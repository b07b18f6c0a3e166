"""The problem's fault: its reference raises an exception."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.ones(3, 3, dtype=x.dtype, device=x.device)  # the shapes do not fit


def get_inputs():
    return [torch.randn(64, 64)]


def get_init_inputs():
    return []
