"""Returns a list that holds itself for the constructor: ``invalid_problem``."""

import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1


def get_inputs():
    return [torch.randn(16, 8)]


def get_init_inputs():
    knot = []
    knot.append(knot)
    return knot
