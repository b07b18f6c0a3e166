"""A rotary embedding: the second half of its cosines and sines repeats the first."""

BATCH = 8
HEADS = 32
TOKENS = 8192
SIZE = 128
DRAWN = False  # the places of the tokens; else they are 0, 1, 2, and so on


def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def get_inputs():
    places = torch.rand(TOKENS) * TOKENS if DRAWN else torch.arange(TOKENS) * 1.0
    angles = torch.outer(places, 10000.0 ** (-torch.arange(0, SIZE, 2) / SIZE))
    angles = torch.cat([angles, angles], dim=-1)
    return [torch.randn(BATCH, HEADS, TOKENS, SIZE), angles.cos(), angles.sin()]
