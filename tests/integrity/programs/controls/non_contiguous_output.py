"""Honest: an output whose strides are not the reference's.

Shape and values are right; the memory is in the order that suited the kernel.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x.t().contiguous(), approximate="tanh").t()
