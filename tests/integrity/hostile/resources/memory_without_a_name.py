"""Takes memory that no process has mapped: anonymous files.

The control group counts them: ``reference_error``.
"""

import os

import torch


def get_inputs():
    held = []
    while True:
        held.append(os.memfd_create("held"))
        os.write(held[-1], bytes(16 << 20))


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1


def get_init_inputs():
    return []
