"""Scaled SiLU with a backward of its own, which keeps the sigmoid instead of computing it again."""

import torch
import torch.nn as nn


class ScaledSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        z = x * scale
        gate = torch.sigmoid(z)
        ctx.save_for_backward(x, scale, z, gate)
        return z * gate

    @staticmethod
    def backward(ctx, upstream):
        x, scale, z, gate = ctx.saved_tensors
        inner = upstream * torch.addcmul(gate, z * gate, 1 - gate)
        return inner * scale, (inner * x).sum(0)


class ModelNew(nn.Module):
    def __init__(self, features: int):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(features) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ScaledSilu.apply(x, self.scale)
