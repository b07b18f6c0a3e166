"""The same chain under a fourth name: its baseline is taken beside kernels that patch torch."""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    y = x
    for _ in range(32):
        y = torch.tanh(0.5 * y + x)
    return y


def get_inputs():
    return [torch.randn(128, 256)]
