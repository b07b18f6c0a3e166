"""Honest: torch's own negation.

What a negation that is put off is compared with. It must pass.
"""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.neg(x)
