"""The mean of everything up to each place, which hardly changes from one place to the next."""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    counts = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype)
    return torch.cumsum(x, dim=-1) / counts


def get_inputs():
    return [torch.randn(16, 65536)]
