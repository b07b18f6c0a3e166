"""One element: as little work as there can be."""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    return x * x


def get_inputs():
    return [torch.randn(1)]
