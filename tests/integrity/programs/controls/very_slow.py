"""Honest: half a second on the GPU, a twentieth on a CPU.

Slow is no fault, and few calls must do for a time.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    if x.is_cuda:
        torch.cuda._sleep(1_000_000_000)
    else:
        time.sleep(0.05)
    return F.gelu(x, approximate="tanh")
