"""An endless loop while the source is imported (here: of ten minutes)."""

import time

import torch
import torch.nn as nn

stop = time.monotonic() + 600
while time.monotonic() < stop:
    pass


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x
