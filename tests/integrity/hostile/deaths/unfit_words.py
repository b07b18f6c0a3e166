"""Raises an exception with a message of NUL, half characters and a terminal's orders: ``reference_error``.

Texts are bounded, decoded with replacement, and decide nothing.
"""

import torch


class Model(torch.nn.Module):
    def forward(self, x):
        raise type("\ud800" * 500, (Exception,), {})("\0\ud800\x1b]0;owned\a" * 10_000)


def get_inputs():
    return [torch.randn(16, 8)]


def get_init_inputs():
    return []
