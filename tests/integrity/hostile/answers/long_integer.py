"""Returns an integer of a million digits for the constructor: ``reference_error``."""

import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1


def get_inputs():
    return [torch.randn(16, 8)]


def get_init_inputs():
    return [10**1_000_000]
