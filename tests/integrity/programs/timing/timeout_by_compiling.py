"""Says that a compiler runs, to have its work charged to the compiler's deadline.

The word COMPILING lies in shared memory; while it is set, time counts against the deadline for compilation. It moves
time between two deadlines and ends at the second one.
"""

COMPILING = 48


def forward(self, x: torch.Tensor) -> torch.Tensor:
    harness()._flags[COMPILING] = 1
    time.sleep(600)
    return F.gelu(x, approximate="tanh")
