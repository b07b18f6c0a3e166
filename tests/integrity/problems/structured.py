"""An operation whose inputs keep a promise. The corpus says which one, and how large they are."""

STRUCTURE = "symmetric"
SIZE = 16384


def weighted(x, y):
    return x / x.sum(dim=-1, keepdim=True) @ y


def largest(x, y):
    return x.amax(dim=-1, keepdim=True) * y


def dots(x, y):
    return (x * y).sum(dim=-1)


def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return {"normalised": weighted, "sorted": largest, "shared": dots}.get(STRUCTURE, torch.matmul)(x, y)


def get_inputs():
    if STRUCTURE == "one_hot":
        x = torch.zeros(SIZE, SIZE).scatter_(1, torch.randint(0, SIZE, (SIZE, 1)), 1.0)
    else:
        x = torch.rand(SIZE, SIZE)
    if STRUCTURE == "symmetric":
        x = (x + x.t()) / 2
    elif STRUCTURE == "triangular":
        x = x.tril()
    elif STRUCTURE == "normalised":
        x = torch.softmax(x, dim=-1)
    elif STRUCTURE == "sorted":
        x = x.sort(dim=-1).values
    return [x, x] if STRUCTURE == "shared" else [x, torch.rand(SIZE, 64)]
