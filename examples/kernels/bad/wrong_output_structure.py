"""Returns a list of one tensor, but the reference returns a tensor."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [F.gelu(x, approximate="tanh")]
