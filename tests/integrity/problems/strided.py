"""The output is every second column of a larger result, transposed: dear to copy."""

SIZE = 8192


def forward(self, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x)[:, ::2].t()


def get_inputs():
    return [torch.randn(SIZE, SIZE)]
