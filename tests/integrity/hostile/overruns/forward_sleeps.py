"""Sleeps in ``forward`` when it is called for the third time: ``reference_timeout``."""

import time

import torch


class Model(torch.nn.Module):
    calls = 0

    def forward(self, x):
        Model.calls += 1
        if Model.calls == 3:
            time.sleep(1000)
        return x * 2 + 1


def get_inputs():
    return [torch.randn(16, 8)]


def get_init_inputs():
    return []
