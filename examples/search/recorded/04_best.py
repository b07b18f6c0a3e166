"""One pass: the best there is."""

import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x):
        return x + 256
