"""Leaves out one value in five hundred.

Some evaluators accept an output of which 99 % of the values match. Here all of them must.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    out = F.gelu(x, approximate="tanh")
    out.view(-1)[::500] = 0.0
    return out
