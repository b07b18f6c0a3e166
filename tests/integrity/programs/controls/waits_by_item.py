"""Honest: a forward that asks for a value of its input.

Such a kernel cannot be enqueued ahead: it is timed by the CPU clock, end to end, and says so.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    if x[0, 0].item() > 1e30:
        return torch.zeros_like(x)
    return F.gelu(x, approximate="tanh")
