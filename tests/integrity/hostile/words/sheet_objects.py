"""Writes values on the sheet that no argument may be: ``invalid_problem``."""

import json
import struct
import sys

import torch


def caller(name):
    """A local variable of the frames below: the harness and its channel are there."""
    frame = sys._getframe()
    while name not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals[name]


def write(text, tensors=b""):
    """Write this on the sheet whenever something is to be told."""
    from workers.judge.channel import sheet

    text = json.dumps(text).encode() if not isinstance(text, bytes) else text
    content = struct.pack("=IQQ", 0x6B715348, len(text), len(tensors)) + text + tensors

    def tell(value, what):
        own._sheet[: len(content)] = content

    own = caller("self")
    own._tell = tell


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1


def get_inputs():
    write([{"is": "leaf"}, {"is": "range", "of": [0, 10**9, 1]}])
    return [torch.randn(16, 8)]


def get_init_inputs():
    return []
