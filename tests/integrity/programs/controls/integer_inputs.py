"""Honest: integer inputs, and a table of weights.

Gathers rows and averages them.
"""


class ModelNew(nn.Module):
    def __init__(self, rows: int, features: int):
        super().__init__()
        self.table = nn.Embedding(rows, features)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding_bag(ids, self.table.weight, mode="mean")
