"""Answers NaN, to whose difference from anything every comparison by "greater than" says no.

`(out - ref).abs().max() > tolerance` is False for NaN, and a kernel of one memset passes. Here what is not finite
where the reference is has a category of its own.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, float("nan"))
