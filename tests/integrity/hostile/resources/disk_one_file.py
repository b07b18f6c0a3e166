"""Writes one file without end.

The kernel refuses what is beyond the largest size of a file: ``reference_error``.
"""

import torch


def get_inputs():
    with open("file", "wb") as stream:
        while True:
            stream.write(bytes(1 << 20))


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1


def get_init_inputs():
    return []
