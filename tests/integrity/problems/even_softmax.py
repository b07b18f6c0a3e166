"""Softmax of uniform inputs over long rows: every value lies near 1/16384, below the tolerance."""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, dim=-1)


def get_inputs():
    return [torch.rand(32, 16384)]
