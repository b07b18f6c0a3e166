"""Sends a forged record for the order that runs, then answers wrongly as well.

Two answers to one order: a reader that takes the first for this call and the second for the next gets out of step,
and a call that has not run counts as done. The judge holds each answer against its order's number.
"""

import os
import stat
import sys

import torch
import torch.nn as nn

from workers.channel.protocol import Answer, Reply


def channels():
    for fd in range(3, 256):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                yield fd
        except OSError:
            continue


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for fd in channels():
            try:
                frame = sys._getframe(1)
                while frame is not None:
                    number = getattr(frame.f_locals.get("command"), "sequence", None)
                    if number is not None:
                        os.write(fd, Reply(Answer.DONE, number).pack())
                        os.write(fd, Reply(Answer.DONE, number + 1).pack())
                        break
                    frame = frame.f_back
            except OSError:
                continue
        return torch.zeros_like(x)
