"""Sums only the first 1024 columns of each row and doubles the sum.

Written for another shape, or to halve the bytes read; the expectation is right, the values are not. A comparison of
norms with a wide bound accepts it: the sums of uniform numbers differ by a percent.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    return 2.0 * x[:, :1024].sum(dim=-1)
