"""Sleeps when it is timed as the baseline, and only then: ``reference_timeout``.

The phase of timing has a deadline of its own.
"""

import sys
import time

import torch


class Model(torch.nn.Module):
    def forward(self, x):
        if sys._getframe(4).f_code.co_name == "_time" or sys._getframe(5).f_code.co_name == "_time":
            time.sleep(1000)
        return x * 2 + 1


def get_inputs():
    return [torch.randn(16, 8)]


def get_init_inputs():
    return []
