"""Raises an exception while it is imported."""

import torch
import torch.nn as nn

TABLE = {"block": 128}
BLOCK = TABLE["blocks"]  # KeyError


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x
