"""Returns a million numbers for the constructor: ``invalid_problem``."""

import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1


def get_inputs():
    return [torch.randn(16, 8)]


def get_init_inputs():
    return list(range(1_000_000))
