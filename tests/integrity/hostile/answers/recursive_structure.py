"""Answers with a list that holds itself: ``reference_error``."""

import torch


class Model(torch.nn.Module):
    calls = 0

    def forward(self, x):
        Model.calls += 1
        knot = [x]
        knot.append(knot)
        return knot


def get_inputs():
    return [torch.randn(16, 8)]


def get_init_inputs():
    return []
