"""Imports a module that does not exist."""

import torch
import torch.nn as nn
import a_module_that_nobody_wrote


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return a_module_that_nobody_wrote.gelu(x)
