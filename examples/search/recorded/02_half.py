"""Half of the passes."""

import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x):
        for _ in range(128):
            x = x + 2
        return x
