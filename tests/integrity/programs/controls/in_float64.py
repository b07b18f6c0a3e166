"""Honest: computes in float64 what the reference computes in fp32, or in TF32.

Where the reference rounds, the two differ, and the kernel is nearer to the exact value. That is no error.
"""

OPERATION = "matmul"


def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = a.double(), b.double()
    return (F.conv2d(a, b) if OPERATION == "conv2d" else a @ b).float()
