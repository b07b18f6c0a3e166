"""Hands the reference's own code to torch.compile and calls that a Triton kernel.

The generated kernels are Triton's, none of them is the candidate's. Passing is no lie about speed, only about who
wrote it: provenance tells kernels that torch's compiler wrote from those in the candidate's source.
"""

import triton  # noqa: F401


@torch.compile
def gelu(x):
    return F.gelu(x, approximate="tanh")


def forward(self, x: torch.Tensor) -> torch.Tensor:
    return gelu(x)
