"""Honest: two streams, forked from the current one and joined again by events.

Halves of the product run side by side; nothing is left behind when forward() returns.
"""


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = torch.empty(a.shape[0], b.shape[1], device=a.device, dtype=a.dtype)
        current = torch.cuda.current_stream()
        fork = current.record_event()
        half = a.shape[0] // 2
        for stream, rows in zip(self.streams, (slice(0, half), slice(half, None))):
            with torch.cuda.stream(stream):
                stream.wait_event(fork)
                torch.mm(a[rows], b, out=out[rows])
                current.wait_event(stream.record_event())
        return out
