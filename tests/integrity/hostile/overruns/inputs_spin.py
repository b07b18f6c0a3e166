"""Computes in ``get_inputs`` for ever, deaf to signals: ``reference_timeout``."""

import signal

import torch


def get_inputs():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    while True:
        pass


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1


def get_init_inputs():
    return []
