"""Elementwise: GELU in its tanh form, as GPT-2 has it."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate="tanh")


def get_inputs():
    return [torch.randn(512, 1024)]


def get_init_inputs():
    return []
