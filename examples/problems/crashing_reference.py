"""The problem's fault: its reference kills the process that runs it."""

import ctypes

import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ctypes.string_at(0)  # reads address 0: SIGSEGV
        return x


def get_inputs():
    return [torch.randn(64, 64)]


def get_init_inputs():
    return []
