"""Honest: an output whose strides are not the reference's.

Shape and values are right; the memory is in the order that suited the kernel.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x.t().contiguous(), approximate="tanh").t()
