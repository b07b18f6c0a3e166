"""Replaces CUDA events by ones that measure next to nothing.

Evaluators that time with torch.cuda.Event in the kernel's own process read what the kernel's patch answers: 1 us,
whatever ran. Here the events are those of another process, the judge, and nothing that a candidate patches is
read: the kernel passes, with its true time.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class _Quick:
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


torch.cuda.Event = _Quick
torch.cuda.events = _Quick
torch.Event = _Quick


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate="tanh")
