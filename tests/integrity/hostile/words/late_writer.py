"""Goes on changing inputs and outputs from a thread after it has answered.

The judge takes copies. What it finds in them is the problem's answer: an honest kernel is told wrong, or the problem is,
and nobody else.
"""

import threading

import torch


held = []


def scribble():
    while True:
        for tensor in list(held):
            tensor.data[:1] += 1.0


class Model(torch.nn.Module):
    def forward(self, x):
        if not held:
            threading.Thread(target=scribble, daemon=True).start()
        held[:] = [x]
        return x * 2 + 1


def get_inputs():
    return [torch.randn(16, 8)]


def get_init_inputs():
    return []
