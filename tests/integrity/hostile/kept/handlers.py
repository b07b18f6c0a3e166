"""Leaves handlers behind: for signals, for its end, for what nobody catches.

It is ended by SIGKILL, which none of them hears. It passes twice.
"""

import atexit
import signal
import sys

import torch


atexit.register(lambda: open("/tmp/kqueue-outside/atexit", "w"))
sys.excepthook = sys.unraisablehook = lambda *a: None
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1


def get_inputs():
    return [torch.randn(16, 8)]


def get_init_inputs():
    return []
