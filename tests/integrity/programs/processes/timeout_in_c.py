"""Sleeps in C without letting go of the interpreter's lock, with every signal ignored.

A deadline that rests on SIGALRM's Python handler, or on a thread of the same process, never comes. Here another
process watches the clock and kills.
"""

for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU):
    signal.signal(number, signal.SIG_IGN)


def forward(self, x: torch.Tensor) -> torch.Tensor:
    ctypes.PyDLL(None).sleep(600)
    return x
