"""A residual block with layer scale: the branch adds less than the tolerance, as at the start of a training."""


class Model(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.branch = nn.Linear(size, size)
        self.scale = nn.Parameter(torch.full((size,), 1e-5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.branch(x)


def get_inputs():
    return [torch.randn(128, 256)]


def get_init_inputs():
    return [256]
