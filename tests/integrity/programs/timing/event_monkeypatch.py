"""Replaces CUDA events by ones that measure next to nothing; the kernel takes 20 ms.

Evaluators that time with torch.cuda.Event in the kernel's own process read what the kernel's patch answers: 1 us,
whatever ran. Here the events are those of another process, the judge, and nothing that a candidate patches is
read: it passes with its true time.
"""

import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Quick:
    def __init__(self, *args, **kwargs):
        pass

    def record(self, *args, **kwargs):
        pass

    def wait(self, *args, **kwargs):
        pass

    def query(self):
        return True

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return 0.001


torch.cuda.Event = torch.Event = torch.cuda.streams.Event = Quick


def slow(x):
    if x.is_cuda:
        torch.cuda._sleep(40_000_000)  # cycles: 20 ms at the fastest clock
    else:
        time.sleep(0.02)


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slow(x)
        return F.gelu(x, approximate="tanh")
