"""Raises an exception whose text, name and attributes raise exceptions themselves.

What reports an error asks it for its words, and dies of the question. It dies in the candidate's own process, whose
end is the kernel's failure.
"""


class Mute(Exception):
    error_code = property(lambda self: 1 / 0)
    status = property(lambda self: 1 / 0)

    def __str__(self):
        raise self

    __repr__ = __str__


def forward(self, x: torch.Tensor) -> torch.Tensor:
    raise Mute
