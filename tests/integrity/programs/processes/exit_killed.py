"""Kills itself with the signal that the operating system uses when memory runs out.

An evaluator that takes SIGKILL for the host's memory killer blames the host and tries again. Here a filter refuses it:
the call raises PermissionError.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    return torch.zeros_like(x)
