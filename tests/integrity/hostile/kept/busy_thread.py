"""Computes in threads while it is kept and others are timed.

The fork server ends a reference that works while it has nothing to do. The next evaluation gets a new one and passes.
"""

import threading

import torch


# Made once: torch's default dtype changes while the reference answers in float64.
ONES = torch.ones(200, 200)


def spin():
    while True:
        ONES @ ONES


for _ in range(4):
    threading.Thread(target=spin, daemon=True).start()


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1


def get_inputs():
    return [torch.randn(16, 8)]


def get_init_inputs():
    return []
