"""Returns a transposed view of its input where the reference makes a copy.

No kernel runs at all, and shape and values agree; whoever uses the result pays for the copy. Here an output must not
lie in the judge's buffers unless the reference's does.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    return x.t()
