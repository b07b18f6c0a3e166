"""Aborts in ``get_init_inputs``: ``reference_error``."""

import os

import torch


def get_init_inputs():
    os.abort()


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1


def get_inputs():
    return [torch.randn(16, 8)]
