"""A chain of many small operations: slow in eager mode, with much to gain."""

BESIDE = "nothing"  # else what its baseline is taken beside, which makes it another problem


def forward(self, x: torch.Tensor) -> torch.Tensor:
    y = x
    for _ in range(32):
        y = torch.tanh(0.5 * y + x)
    return y


def get_inputs():
    return [torch.randn(128, 256)]
