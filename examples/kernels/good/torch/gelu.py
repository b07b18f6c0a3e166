"""GELU written out with fewer multiplications, as one might hand it to a compiler."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x * (1.5957691216057308 + 0.07135481282553499 * x * x))
