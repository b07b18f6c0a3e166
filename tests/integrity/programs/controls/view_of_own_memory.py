"""Honest: a view into a larger buffer of its own.

The output begins in the middle of an allocation, with room between its rows.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    rows, columns = x.shape
    buffer = torch.zeros(rows + 2, columns + 32, dtype=x.dtype, device=x.device)
    view = buffer[1:-1, 16:-16]
    view.copy_(F.gelu(x, approximate="tanh"))
    return view
