"""Asks for 4 TB of GPU memory at once."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.empty(1 << 40, dtype=torch.float32, device=x.device)
        return x + table[0]
