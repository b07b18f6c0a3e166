"""The sign turned."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -x


def get_inputs():
    return [torch.randn(512, 1024)]


def get_init_inputs():
    return []
