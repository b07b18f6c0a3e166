"""Honest: a large workspace allocated and freed at every call.

Half of the work goes through memory that is returned to the allocator before forward() ends.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    workspace = torch.empty((4, *x.shape), dtype=x.dtype, device=x.device)
    workspace[0] = x * x * x
    workspace[1] = 0.7978845608028654 * (x + 0.044715 * workspace[0])
    workspace[2] = torch.tanh(workspace[1])
    return 0.5 * x * (1.0 + workspace[2])
