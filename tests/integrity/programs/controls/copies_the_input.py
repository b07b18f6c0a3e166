"""Honest: a copy of the input where the reference returns the input itself.

More work than the reference does, and as right.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    return x.clone()
