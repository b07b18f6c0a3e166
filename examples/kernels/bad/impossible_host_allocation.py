"""Allocates more host memory at once than any machine has: Python raises MemoryError."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = bytearray(1 << 60)
        return x + len(table)
