"""Reads address 0 while it is imported."""

import ctypes

import torch
import torch.nn as nn

ctypes.string_at(0)


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x
