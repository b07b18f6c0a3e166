"""Honest: torch's own negation.

What a negation that is put off is compared with. It must pass.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    return torch.neg(x)
