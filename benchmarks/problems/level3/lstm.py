"""Two layers of an LSTM, and a linear layer over its last output."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, size_in: int, hidden: int, layers: int, size_out: int):
        super().__init__()
        self.lstm = nn.LSTM(size_in, hidden, layers, batch_first=True)
        self.project = nn.Linear(hidden, size_out)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(x, (hidden, cell))
        return self.project(x[:, -1])


def get_inputs():
    return [torch.rand(32, 256, 128), torch.rand(2, 32, 256), torch.rand(2, 32, 256)]


def get_init_inputs():
    return [128, 256, 2, 10]
