"""Prints what a process says whose seal failed, and exits with its status: ``reference_error``.

The seal is reported on a pipe that is closed before foreign code runs.
"""

import os
import sys

import torch


def get_inputs():
    for number in range(3, 64):
        try:
            os.write(number, b"PermissionError: the seal failed")
        except OSError:
            continue
    os._exit(70)


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1


def get_init_inputs():
    return []
