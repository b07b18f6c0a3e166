"""Honest: the input itself, as the reference returns it.

Only where the reference does so is this an answer.
"""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x
