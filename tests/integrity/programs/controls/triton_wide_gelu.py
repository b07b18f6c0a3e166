"""Honest: GELU in Triton.

A hand-written kernel of ordinary form.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    x, out, n = x.contiguous(), torch.empty_like(x), x.numel()
    gelu_kernel[(triton.cdiv(n, 1024),)](x, out, n, BLOCK=1024)
    return out
