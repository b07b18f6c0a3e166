"""A constructor that never returns: it sleeps (here: for ten minutes)."""

import time

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        time.sleep(600)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x
