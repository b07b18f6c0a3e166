"""Sums rows, ROWS at a time and in parts of WIDTH columns: `kqueue tune` finds how many."""

import torch
import torch.nn as nn

ROWS = 4
WIDTH = 64


class ModelNew(nn.Module):
    def forward(self, x):
        parts = []
        for first in range(0, x.shape[0], ROWS):
            rows = x[first : first + ROWS]
            parts.append(sum(rows[:, at : at + WIDTH].sum(dim=1) for at in range(0, x.shape[1], WIDTH)))
        return torch.cat(parts)
