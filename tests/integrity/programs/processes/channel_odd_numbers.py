"""Sends records whose numbers lie outside all bounds.

Counts, dimensions and enumerations beyond their ends make a careless reader allocate without end or index beyond a
table. Here every number is checked on the judge's side before it is used.
"""

import os
import stat
import sys

import torch
import torch.nn as nn

from workers.judge.channel.protocol import Answer, Reply


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
                record = bytearray(Reply(Answer.MISMATCH, 1).pack())
                record[4:8] = b"\xff" * 4
                record[-400:] = b"\xff" * 400
                os.write(fd, bytes(record))
            except OSError:
                continue
        return torch.zeros_like(x)
