"""Clears its input and returns zeros, hoping that the reference is run on what is left.

With relu(0) = 0 and gelu(0) = 0 both sides agree where they share their inputs. Here they do not, and a changed input
is a verdict of its own.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    x.zero_()
    return torch.zeros_like(x)
