"""Returns a string of 100 MB for the constructor: ``invalid_problem``."""

import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1


def get_inputs():
    return [torch.randn(16, 8)]


def get_init_inputs():
    return ["x" * 100_000_000]
