"""Honest: a forward that waits for the device before it returns.

Needless, and no cheat: it is timed by the CPU clock, end to end, and says so.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    out = F.gelu(x, approximate="tanh")
    torch.cuda.synchronize()
    return out
