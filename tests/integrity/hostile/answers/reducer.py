"""Puts objects into the constructor's arguments that run a command where they are unpickled: ``invalid_problem``.

Values travel in a form of their own, which calls nothing that the writer names.
"""

import os

import torch


class Bomb:
    def __reduce__(self):
        return os.system, ("touch /tmp/kqueue-outside/unpickled",)


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1


def get_inputs():
    return [torch.randn(16, 8)]


def get_init_inputs():
    return [Bomb(), {"nested": [Bomb()]}]
