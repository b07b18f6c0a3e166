"""Sends itself SIGHUP in ``forward``: ``reference_error``.

Only SIGKILL, which operators send, counts as the fleet's doing.
"""

import os
import signal

import torch


class Model(torch.nn.Module):
    def forward(self, x):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever started the fleet may have it ignored
        os.kill(os.getpid(), signal.SIGHUP)
        return x * 2 + 1


def get_inputs():
    return [torch.randn(16, 8)]


def get_init_inputs():
    return []
