"""A perceptron with two hidden layers."""

from itertools import pairwise

import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, sizes: list[int]):
        super().__init__()
        layers: list[nn.Module] = []
        for size, following in pairwise(sizes):
            layers += [nn.Linear(size, following), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def get_inputs():
    return [torch.rand(256, 4096)]


def get_init_inputs():
    return [[4096, 2048, 2048, 1000]]
