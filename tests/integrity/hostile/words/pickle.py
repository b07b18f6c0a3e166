"""Writes a pickle on its channel that runs a command where it is loaded: ``reference_error``.

The judge unpickles nothing that a sealed process sends.
"""

import os
import pickle
import sys

import torch


def caller(name):
    """A local variable of the frames below: the harness and its channel are there."""
    frame = sys._getframe()
    while name not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals[name]


class Bomb:
    def __reduce__(self):
        return os.system, ("touch /tmp/kqueue-outside/unpickled",)


def get_inputs():
    caller("channel").send(pickle.dumps(Bomb()))
    return [torch.randn(16, 8)]


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1


def get_init_inputs():
    return []
