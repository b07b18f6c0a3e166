"""Floods its channel with descriptors, as many as a packet carries, and says nothing that can be read.

The judge closes what nobody asked for: ``reference_error``.
"""

import socket
import sys

import torch


def caller(name):
    """A local variable of the frames below: the harness and its channel are there."""
    frame = sys._getframe()
    while name not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals[name]


def get_inputs():
    channel = caller("channel")
    for _ in range(64):
        socket.send_fds(channel, b"\0" * 64, [0] * 250)
    return [torch.randn(16, 8)]


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1


def get_init_inputs():
    return []
