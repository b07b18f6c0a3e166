"""Honest: the input itself, as the reference returns it.

Only where the reference does so is this an answer.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    return x
