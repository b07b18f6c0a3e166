"""Correct at every odd call, wrong at every even one."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out = F.gelu(x, approximate="tanh")
        return out if self.calls % 2 else out + 1.0
