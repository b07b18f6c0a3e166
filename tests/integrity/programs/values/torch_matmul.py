"""Honest: torch's own product of matrices.

What decoys that call a vendor's library are compared with. It must pass.
"""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b
