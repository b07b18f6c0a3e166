"""Imports and helpers of the corpus's problems, and the parts of an honest one: see ``compose.py``."""

import atexit
import contextlib
import ctypes
import dataclasses
import fcntl
import json
import os
import pickle
import platform
import random
import re
import resource
import signal
import socket
import stat
import struct
import sys
import threading
import time
import torch
import torch.nn as nn
import torch.nn.functional as F


class Bomb:
    def __reduce__(self):
        return os.system, ("touch /tmp/kqueue-outside/unpickled",)


def called():
    """Return how often this was called."""
    called.times = getattr(called, "times", 0) + 1
    return called.times


def caller(name):
    """A local variable of the frames below: the harness and its channel are there."""
    frame = sys._getframe()
    while name not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals[name]


def neighbours():
    """The numbers of processes that may exist: init, the fork server, and those made shortly before and after."""
    here = os.getpid()
    return [1, os.getppid(), *(pid for pid in range(max(2, here - 300), here + 100) if pid != here)]


def refused(what, attempt):
    """Do something that must be refused; if it is not, say so where nobody can overlook it."""
    try:
        found = attempt()
    except (OSError, ValueError):
        return
    raise RuntimeError(f"ATTACK SUCCEEDED: {what}: {str(found)[:200]}")


def rest_and_then(act):
    """Come to rest when that is asked, and do something else a moment later."""
    own = caller("self")
    honest = own.orders.get(20)
    if honest is None or honest.__name__ == "rest":
        return
    channel = caller("channel")

    def rest(command):
        threading.Timer(0.1, act, [channel]).start()
        return honest(command)

    own.orders[20] = rest


def telling(shape, dtype=torch.float32):
    """Have the harness tell of tensors of this shape, whatever was drawn."""
    from workers.judge.channel.arguments import LEAF
    from workers.judge.channel.protocol import Answer, Reply, TensorSpec

    def draw(command):
        own._tell({"arguments": [LEAF], "views": [(0, 0, (), (), False)]}, "get_inputs()")
        return Reply(Answer.MISMATCH, command.sequence, tensors=(TensorSpec(dtype, shape, "cpu"),))

    own = caller("self")
    own.orders[16] = draw
    return draw(caller("command"))


def write(text, tensors=b""):
    """Write this on the sheet whenever something is to be told."""
    from workers.judge.channel import scalar_page

    text = json.dumps(text).encode() if not isinstance(text, bytes) else text
    content = struct.pack("=IQQ", 0x6B715348, len(text), len(tensors)) + text + tensors

    def tell(value, what):
        own._scalar_page[: len(content)] = content

    own = caller("self")
    own._tell = tell


class Model(torch.nn.Module):
    def forward(self, x, *others):
        return x * 2 + 1


def get_inputs():
    return [torch.randn(16, 8)]


def get_init_inputs():
    return []
