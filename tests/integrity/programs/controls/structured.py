"""Honest: relies on what its inputs always are, and reads less of them for that.

A half of a symmetric matrix is enough, the zeros of a triangular one are not, the largest of a sorted row is the last,
and two inputs that are one tensor need to be read once. No input that breaks such a promise may be used against it.
"""

STRUCTURE = "symmetric"


def symmetric(x, y):
    return x.triu() @ y + x.triu(1).t() @ y


def triangular(x, y):
    half = x.shape[0] // 2
    return torch.cat([x[:half, :half] @ y[:half], x[half:] @ y])


def one_hot(x, y):
    return y[x.argmax(dim=-1)]


def normalised(x, y):
    return x @ y


def sorted(x, y):
    return x[:, -1:] * y


def shared(x, y):
    return x.square().sum(dim=-1)


def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return globals()[STRUCTURE](x, y)
