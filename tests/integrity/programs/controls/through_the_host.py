"""Honest: a copy of the input by way of pinned host memory.

Only copy engines work for it, so it does not wait for a turn on the GPU's processors, which a null does: unheeded, it
would come out 0.3 ms faster than it is.
"""


class ModelNew(nn.Module):
    host = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.host is None:
            self.host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        self.host.copy_(x, non_blocking=True)
        out = torch.empty_like(x)
        out.copy_(self.host, non_blocking=True)
        return out
