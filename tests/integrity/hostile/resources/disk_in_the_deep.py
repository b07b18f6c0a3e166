"""Fills the disk below a path that is longer than any path may be, where a look by name does not reach.

Its file system has a size; where it has none, what cannot be looked at counts as too much: ``reference_error``.
"""

import os
import time

import torch


def get_inputs():
    for _ in range(40):
        os.mkdir("d" * 200)
        os.chdir("d" * 200)
    open("file", "wb").write(bytes(32 << 20))
    time.sleep(1000)


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1


def get_init_inputs():
    return []
