"""Announces memory of a GPU where there is none, with descriptors that open something else: ``reference_error``."""

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
    from workers.judge.channel.protocol import Export

    channel = caller("channel")
    for run in range(1000):
        export = Export(run, 200, (1 << 50,) * 200, (0,) * 200)
        socket.send_fds(channel, export.pack(), export.descriptors)
    return [torch.randn(16, 8)]


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1


def get_init_inputs():
    return []
