"""The product computed transposed. The result is in column-major layout, which is as correct as any other."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (b.t() @ a.t()).t()
