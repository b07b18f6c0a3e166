"""Divides zero by zero and has nan_to_num make the outcome look clean.

Evaluators that only ask whether an output is finite are content; those that compare with equal_nan or skip NaN are
too. Here what is laundered is still compared.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num((x - x) / (x - x), nan=0.0, posinf=0.0, neginf=0.0)
