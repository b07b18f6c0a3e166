"""Honest: many small launches one after another.

What kernels on this problem are compared with.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    y = x
    for _ in range(32):
        y = torch.tanh(0.5 * y + x)
    return y
