"""Nests the outputs one level deeper than the reference.

Evaluators that flatten both sides compare the right leaves; those that stop at what they do not know skip them. Here
the arrangement must be the reference's.
"""


def forward(self, x: torch.Tensor) -> tuple:
    values, places = torch.max(x, dim=-1)
    return ((values, places),)
