"""LayerNorm from `var_mean` and one fused multiply-add."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, features: int):
        super().__init__()
        self.norm = nn.LayerNorm(features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        var, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
        return torch.addcmul(self.norm.bias, (x - mean) * torch.rsqrt(var + self.norm.eps), self.norm.weight)
