"""Raises an exception that, when unpickled, ends the process that reads it.

multiprocessing and concurrent.futures carry exceptions to the parent as pickles. Here an exception travels as a tag, a
code and bounded text.
"""


class Bomb(Exception):
    def __init__(self):
        super().__init__("x" * 100000)

    def __reduce__(self):
        return os._exit, (0,)


def forward(self, x: torch.Tensor) -> torch.Tensor:
    raise Bomb
