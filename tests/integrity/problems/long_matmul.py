"""A product with 1024 terms a value, of both signs: rounding shows."""


def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def get_inputs():
    return [torch.randn(128, 1024), torch.randn(1024, 128)]
