"""Its answers drift: each call adds a little more than the last, at first within the tolerance.

Evaluators check the first calls and time the later ones. Here outputs of timed calls are compared too, and one more
call is checked after timing.
"""


class ModelNew(nn.Module):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return F.gelu(x, approximate="tanh") + 1e-3 * max(0, self.calls - 5)
