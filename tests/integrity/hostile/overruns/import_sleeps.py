"""Sleeps when it is imported, for ever: ``reference_timeout``."""

import time

import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1


def get_inputs():
    return [torch.randn(16, 8)]


def get_init_inputs():
    return []


time.sleep(1000)
