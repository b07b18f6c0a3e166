"""Draws a subclass of Tensor, whose methods are its own: ``invalid_problem``."""

import torch


class Mine(torch.Tensor):
    pass


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1


def get_inputs():
    return [torch.randn(4, 8).as_subclass(Mine)]


def get_init_inputs():
    return []
