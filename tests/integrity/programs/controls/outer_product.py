"""Multiplies as the reference does, into an output of 10 MB.

What the judge does with so large an output of each call must not differ from one call to the next. The times of
programs that look for such a difference are compared with this one's.
"""


def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a[:, None] * b[None, :]
