"""The problem's fault: its reference never returns (here: not within ten minutes)."""

import time

import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stop = time.monotonic() + 600
        while time.monotonic() < stop:
            pass
        return x


def get_inputs():
    return [torch.randn(64, 64)]


def get_init_inputs():
    return []
