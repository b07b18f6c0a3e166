"""Raises SystemExit in the constructor: ``reference_error``."""

import sys

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        sys.exit(0)


def get_inputs():
    return [torch.randn(16, 8)]


def get_init_inputs():
    return []
