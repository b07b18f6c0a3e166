"""Replaces CUDA events by ones that measure next to nothing; the kernel takes 20 ms.

Evaluators that time with torch.cuda.Event in the kernel's own process read what the kernel's patch answers: 1 us,
whatever ran. Here the events are those of another process, the judge, and nothing that a candidate patches is
read: it passes with its true time.
"""


class Quick:
    def __init__(self, *args, **kwargs):
        pass

    def record(self, *args, **kwargs):
        pass

    def wait(self, *args, **kwargs):
        pass

    def query(self):
        return True

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return 0.001


torch.cuda.Event = torch.Event = torch.cuda.streams.Event = Quick


def forward(self, x: torch.Tensor) -> torch.Tensor:
    slow(x)
    return F.gelu(x, approximate="tanh")
