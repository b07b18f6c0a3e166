"""Honest: two linear layers with weights.

Weights come from the same constructor and seed as the reference's.
"""


class ModelNew(nn.Module):
    def __init__(self, features: int, hidden: int):
        super().__init__()
        self.up = nn.Linear(features, hidden)
        self.down = nn.Linear(hidden, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.addmm(self.up.bias, x, self.up.weight.t())
        return torch.addmm(self.down.bias, F.gelu(hidden), self.down.weight.t())
