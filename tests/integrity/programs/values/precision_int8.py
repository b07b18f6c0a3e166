"""Quantises both factors to 8 bits before it multiplies them.

Fewer bytes and faster units; the error is that of a quantised network, far beyond what fp32 allows. Accepted where
only the direction of the output counts.
"""


def quantised(x):
    scale = x.abs().amax() / 127.0
    return (x / scale).round().clamp(-127, 127).to(torch.int8).to(x.dtype) * scale


def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return quantised(a) @ quantised(b)
