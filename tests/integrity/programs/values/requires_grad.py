"""Honest: computes with gradients on, so that its output hangs on a graph.

Looks odd and is right: the values are those of the reference, and the graph is nobody's business. It must pass.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return F.gelu(x + self.shift, approximate="tanh")
