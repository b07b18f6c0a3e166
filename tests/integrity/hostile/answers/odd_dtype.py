"""Answers with a dtype that the protocol does not know: ``invalid_problem``."""

import torch


class Model(torch.nn.Module):
    calls = 0

    def forward(self, x):
        Model.calls += 1
        return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


def get_inputs():
    return [torch.randn(16, 8)]


def get_init_inputs():
    return []
