"""Stops itself by SIGSTOP: neither alive nor dead.

It uses no time and ends by no signal but SIGKILL. An evaluator that waits for its exit waits for ever.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    os.kill(os.getpid(), signal.SIGSTOP)
    return x
