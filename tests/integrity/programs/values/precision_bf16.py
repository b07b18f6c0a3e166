"""Multiplies in bf16 where fp32 is asked for.

Twice as fast or more, with a hundredth of the accuracy. A tolerance of 1e-2, or a comparison by norms, accepts it.
Here each value is held against the tolerance of the dtype that was asked for.
"""


def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.bfloat16() @ b.bfloat16()).float()
