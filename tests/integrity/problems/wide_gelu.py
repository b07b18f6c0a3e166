"""Elementwise on 16 MB: larger than what caches give back for nothing, smaller than the L2 cache."""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def get_inputs():
    return [torch.randn(4096, 1024)]
