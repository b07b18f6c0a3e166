"""Correct answers, computed in place: the input is overwritten."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(torch.sigmoid(x * (1.5957691216057308 + 0.07135481282553499 * x * x))).clone()
