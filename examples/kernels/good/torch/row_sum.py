"""A row sum as a product with a vector of ones."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mv(x, torch.ones(x.shape[-1], dtype=x.dtype, device=x.device))
