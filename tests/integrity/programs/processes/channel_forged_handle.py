"""Says that its output lies in memory whose handle it made up.

The judge would open it in its own CUDA context; were its failure taken for the GPU's, the kernel would be tried again
until it was lucky. Here a handle that cannot be opened is the kernel's violation.
"""

import os
import stat
import sys

import torch
import torch.nn as nn
from workers.judge.channel.protocol import Answer, Place, Reply, TensorSpec, Where


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


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in orders():
            place = Place(Where.EXPORTED, handle=os.urandom(64), serial=7, stride=x.stride())
            send(Reply(Answer.DONE, number, structure="T", tensors=(TensorSpec.of(x),), places=(place,)))
        return torch.zeros_like(x)
