"""A quarter of the passes."""

import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x):
        for _ in range(64):
            x = x + 4
        return x
