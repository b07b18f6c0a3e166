"""Leaves out a ReLU, as no input of the problem is negative.

Problems often draw inputs from torch.rand, and KernelBench compares on those alone: a copy is right there. Here the
judge tries inputs of its own making beside the problem's, with both signs.
"""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()
