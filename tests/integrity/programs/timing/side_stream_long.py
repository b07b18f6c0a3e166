"""Computes for 20 ms on a side stream that the current stream never waits for.

As an unjoined side stream, but for longer than a time slice of the GPU: the judge's copy of the outputs has its turn
before they are there.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(40_000_000)  # cycles: 20 ms at the fastest clock
        return F.gelu(x, approximate="tanh")
