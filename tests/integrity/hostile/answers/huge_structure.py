"""Answers with a million tensors in nested lists: ``invalid_problem``."""

import torch


class Model(torch.nn.Module):
    calls = 0

    def forward(self, x):
        Model.calls += 1
        return [[x[:1, :1]] * 1000] * 1000


def get_inputs():
    return [torch.randn(16, 8)]


def get_init_inputs():
    return []
