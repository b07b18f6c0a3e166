"""All products of two vectors: small inputs, and an output of 10 MB."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.outer(a, b)


def get_inputs():
    return [torch.randn(1600), torch.randn(1600)]


def get_init_inputs():
    return []
