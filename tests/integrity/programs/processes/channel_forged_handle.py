"""Announces memory by a descriptor that opens none, and says that its output lies there.

The judge tries to open it; were its failure taken for the GPU's, the kernel would be tried again until it was lucky.
Here a descriptor that cannot be opened is the kernel's violation.
"""

import os
import socket
import stat
import sys

import torch
import torch.nn as nn
from workers.judge.channel.packets import send_with_fds
from workers.judge.channel.protocol import Answer, Export, Place, Reply, TensorSpec, Where


def orders():
    """The numbers of the orders that the frames above are carrying out."""
    frame = sys._getframe(1)
    while frame is not None:
        number = getattr(frame.f_locals.get("command"), "sequence", None)
        if number is not None:
            yield number
            return
        frame = frame.f_back


def send(reply):
    for fd in range(3, 256):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.write(fd, reply.pack())
        except OSError:
            continue


def announce(export):
    for fd in range(3, 256):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                send_with_fds(socket.socket(fileno=os.dup(fd)), export.pack(), export.descriptors)
        except OSError:
            continue


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in orders():
            place = Place(Where.EXPORTED, run=0, stride=x.stride())
            announce(Export(0, 1, (2 << 20,), (os.memfd_create("none"),)))
            send(Reply(Answer.DONE, number, structure="T", tensors=(TensorSpec.of(x),), places=(place,)))
        return torch.zeros_like(x)
