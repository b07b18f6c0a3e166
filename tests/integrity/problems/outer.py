"""All products of two vectors: small inputs, and an output of 10 MB."""


def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.outer(a, b)


def get_inputs():
    return [torch.randn(1600), torch.randn(1600)]
