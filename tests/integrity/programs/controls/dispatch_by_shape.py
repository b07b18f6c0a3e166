"""Honest: another code path for each shape.

A table by shape that holds functions, not answers.
"""


def wide(x):
    return F.gelu(x, approximate="tanh")


def narrow(x):
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))


class ModelNew(nn.Module):
    paths = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        path = self.paths.setdefault(tuple(x.shape), wide if x.shape[-1] % 128 == 0 else narrow)
        return path(x)
