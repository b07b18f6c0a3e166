"""Honest: weights transposed once, at the first call, and kept.

What depends on the weights alone may be prepared: it is the same at every call.
"""


class ModelNew(Linear):
    transposed = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.transposed is None:
            self.transposed = self.linear.weight.t().contiguous()
        return torch.relu(torch.addmm(self.linear.bias, x, self.transposed))
