"""Scales its weights a little with every call, as if it went on learning.

The first answers are right. Those of later calls are those of another model, and they are looked at too.
"""


class ModelNew(Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 4:
            self.linear.weight.mul_(0.99)
        return torch.relu(self.linear(x))
