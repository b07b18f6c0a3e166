"""Raises KeyboardInterrupt in ``forward``: ``reference_error``."""

import torch


class Model(torch.nn.Module):
    def forward(self, x):
        raise KeyboardInterrupt


def get_inputs():
    return [torch.randn(16, 8)]


def get_init_inputs():
    return []
