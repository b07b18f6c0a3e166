"""Honest: a copy of the input where the reference returns the input itself.

More work than the reference does, and as right.
"""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()
