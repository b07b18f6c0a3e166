"""Writes NaN where the reference has minus infinity.

inf - inf is NaN, so a comparison by differences cannot tell, and one that masks what is not finite looks away. Here
where the reference is infinite only the same infinity will do.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    return torch.where(x < -1.0, float("nan"), 2.0 * x)
