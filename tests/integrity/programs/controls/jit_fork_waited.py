"""Honest: torch.jit.fork, waited for.

The task's result is what is returned.
"""


@torch.jit.script
def work(x: torch.Tensor) -> torch.Tensor:
    y = x
    for _ in range(32):
        y = torch.tanh(0.5 * y + x)
    return y


@torch.jit.script
def start_and_wait(x: torch.Tensor) -> torch.Tensor:
    return torch.jit.wait(torch.jit.fork(work, x))


def forward(self, x: torch.Tensor) -> torch.Tensor:
    return start_and_wait(x)
