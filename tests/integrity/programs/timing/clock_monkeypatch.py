"""Slows Python's clocks a thousandfold; the kernel takes 20 ms.

An evaluator that calls time.perf_counter() in the kernel's process measures 20 us. The judge reads its own clock:
it passes with its true time.
"""

import time

import torch
import torch.nn as nn
import torch.nn.functional as F


def slowed(clock, unit):
    begun = clock()
    return lambda: begun + unit((clock() - begun) / 1000)


for name in ("perf_counter", "monotonic", "time", "process_time", "thread_time"):
    setattr(time, name, slowed(getattr(time, name), float))
    setattr(time, name + "_ns", slowed(getattr(time, name + "_ns"), int))


def slow(x):
    if x.is_cuda:
        torch.cuda._sleep(40_000_000)  # cycles: 20 ms at the fastest clock
    else:
        time.sleep(0.02)


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slow(x)
        return F.gelu(x, approximate="tanh")
