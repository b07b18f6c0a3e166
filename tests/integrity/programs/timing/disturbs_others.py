"""Loads the device while it is constructed, to disturb what others are timed with.

It cannot gain by that itself, but rivals of other slots lose. It takes until its deadline at most: construction that does
not end is its own failure.
"""


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        until = time.monotonic() + 60
        while time.monotonic() < until:
            if torch.cuda.is_available():
                torch.cuda._sleep(2_000_000)
                torch.cuda.synchronize()
            else:
                torch.rand(256, 256) @ torch.rand(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate="tanh")
