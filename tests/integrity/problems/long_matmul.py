"""A product with 1024 terms a value, of both signs: rounding shows."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b


def get_inputs():
    return [torch.randn(128, 1024), torch.randn(1024, 128)]


def get_init_inputs():
    return []
