"""Exits with status 0 in ``get_inputs``, as if all were done: ``reference_error``."""

import os

import torch


def get_inputs():
    os._exit(0)


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1


def get_init_inputs():
    return []
