"""Returns 1/n for every value of a softmax over long rows.

With uniform inputs all values lie between 3e-5 and 1e-4, and the absolute tolerance of 1e-4 accepts their mean, or
zeros. Here the error is also measured against the size of the reference, and inputs of other kinds are tried.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, 1.0 / x.shape[-1])
