"""Draws inputs that follow no seed.

Its answer to an input of the evaluation before cannot be the same: it is replaced each time. It passes.
"""

import os

import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1


def get_inputs():
    return [torch.frombuffer(bytearray(os.urandom(128)), dtype=torch.uint8).float().reshape(16, 8)]


def get_init_inputs():
    return []
