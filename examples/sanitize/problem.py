"""ReLU, as large as in KernelBench's level 1, but of odd sizes."""

import torch
import torch.nn as nn

BATCH = 4095
DIM = 393217


class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x)


def get_inputs():
    return [torch.rand(BATCH, DIM)]


def get_init_inputs():
    return []
