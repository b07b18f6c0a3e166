"""Honest: a rotary embedding that reads only the first half of its cosines and sines.

The second half repeats the first in every input that the problem makes, so nobody may change one of them alone.
"""


def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    first, second, cos, sin = x[..., :half], x[..., half:], cos[:, :half], sin[:, :half]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
