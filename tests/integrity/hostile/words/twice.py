"""Answers each order twice, so that the judge takes an old answer for a new one.

The answer does not fit the order: the problem fails.
"""

import sys

import torch


def caller(name):
    """A local variable of the frames below: the harness and its channel are there."""
    frame = sys._getframe()
    while name not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals[name]


def get_inputs():
    channel, command = caller("channel"), caller("command")
    from workers.judge.channel.protocol import Answer, Reply

    channel.send(Reply(Answer.DONE, command.sequence).pack())
    return [torch.randn(16, 8)]


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1


def get_init_inputs():
    return []
