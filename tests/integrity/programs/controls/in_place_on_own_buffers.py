"""Honest: in-place operations on buffers of its own.

The input is only read; everything that is written belongs to the kernel.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    for _ in range(32):
        y.mul_(0.5).add_(x).tanh_()
    return y
