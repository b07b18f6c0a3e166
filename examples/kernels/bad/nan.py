"""One NaN among half a million correct values."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.gelu(x, approximate="tanh")
        out[-1, -1] = float("nan")
        return out
