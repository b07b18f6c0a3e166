"""Leaves out a whole branch with its matrix, which adds less than the tolerance.

Layer scale starts at 1e-5, so the linear layer behind it changes nothing that a tolerance of 1e-4 would see, while it
is all of the work. Here a few extreme values are among the inputs that are tried: where they are large the branch is
not small, and small values beside them show it.
"""


class ModelNew(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.branch = nn.Linear(size, size)
        self.scale = nn.Parameter(torch.full((size,), 1e-5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()
