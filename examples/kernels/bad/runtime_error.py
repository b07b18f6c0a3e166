"""`forward` raises an exception."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] % 7:
            raise ValueError(f"expects a multiple of 7 rows, got {x.shape[0]}")
        return x
