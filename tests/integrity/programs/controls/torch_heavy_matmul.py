"""Honest: cuBLAS by torch, hundreds of microseconds.

What kernels on this problem are compared with.
"""


def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b
