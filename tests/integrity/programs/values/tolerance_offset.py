"""Spends all of the tolerance: every value is off by 9e-5.

Nothing is gained by an offset, but a kernel that may be off by so much may leave out whatever is smaller. The error's
figures in the verdict tell it from rounding, a hundredfold; what is within the tolerance passes all the same.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh") + 9e-5
