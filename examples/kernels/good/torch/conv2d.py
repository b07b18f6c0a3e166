"""A convolution as a matrix product: unfold the patches, multiply, fold."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, _, height, width = x.shape
        patches = F.unfold(x, kernel_size=3, padding=1)
        out = self.conv.weight.flatten(1) @ patches + self.conv.bias[:, None]
        return out.view(n, -1, height, width)
