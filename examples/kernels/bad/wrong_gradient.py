"""Right forward, but the backward takes the sigmoid alone for the derivative of SiLU."""

import torch
import torch.nn as nn


class ScaledSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        z = x * scale
        gate = torch.sigmoid(z)
        ctx.save_for_backward(x, scale, gate)
        return z * gate

    @staticmethod
    def backward(ctx, upstream):
        x, scale, gate = ctx.saved_tensors
        inner = upstream * gate
        return inner * scale, (inner * x).sum(0)


class ModelNew(nn.Module):
    def __init__(self, features: int):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(features) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ScaledSilu.apply(x, self.scale)
