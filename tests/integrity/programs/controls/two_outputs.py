"""Honest: two outputs, one of them of integers.

Values and places of the largest elements.
"""


def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.max(dim=1)[0], x.argmax(dim=1)
