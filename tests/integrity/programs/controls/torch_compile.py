"""Honest: torch.compile, in place of a kernel of its own.

Compiled at the first call. Its kernels are torch's, which the provenance says; that alone is no fault.
"""


@torch.compile
def chain(x):
    y = x
    for _ in range(32):
        y = torch.tanh(0.5 * y + x)
    return y


def forward(self, x: torch.Tensor) -> torch.Tensor:
    return chain(x)
