"""A problem, kernels of each kind for it, and the fewest calls."""

from typing import Any

REFERENCE = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x):
        return x * 2 + 1


def get_inputs():
    return [torch.randn(64, 64)]


def get_init_inputs():
    return []
"""
RIGHT = REFERENCE.replace("class Model", "class ModelNew")
WRONG = RIGHT.replace("x * 2 + 1", "x * 2")
RAISES = RIGHT.replace("return x * 2 + 1", "raise ValueError('only for rows of seven')")
NO_KERNEL = "x = 1\n"
#: The reference fails, so nothing is known about any kernel.
BROKEN_REFERENCE = REFERENCE.replace("return x * 2 + 1", "raise OSError('no such weights')")

#: KernelBench's arguments for as few calls as possible.
QUICK: dict[str, Any] = {"backend": "torch", "num_correct_trials": 1, "num_perf_trials": 5}
#: The same on the lane `cpu`, scored by correctness.
SETTINGS: dict[str, Any] = QUICK | {"lane": "cpu", "score": "correctness"}
