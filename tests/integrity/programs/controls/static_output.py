"""Honest: one output tensor, allocated once and returned at every call.

It holds the right values whenever it is returned.
"""


class ModelNew(nn.Module):
    out = None

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if self.out is None:
            self.out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
        return torch.mm(a, b, out=self.out)
