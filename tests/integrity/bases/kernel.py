"""Imports and helpers of the corpus's kernels, and the right kernel of those that only attack: see ``compose.py``."""

import array
import atexit
import contextlib
import ctypes
import dataclasses
import gc
import glob
import hashlib
import importlib
import json
import math
import mmap
import os
import pathlib
import platform
import pwd
import shutil
import signal
import site
import socket
import stat
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import types
import cupy
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl
from pathlib import Path
from torch._subclasses.fake_tensor import FakeTensorMode
from workers.judge.channel.buffers import Exports
from workers.judge.channel.packets import send_with_fds
from workers.judge.channel.protocol import Answer, Export, Location, Reply, TensorSpec, Where


class _Raw:
    def __init__(self, pointer, count):
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "<f4",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


def announce(export):
    for fd in channels():
        with contextlib.suppress(OSError):
            send_with_fds(socket.socket(fileno=os.dup(fd)), export.pack(), export.descriptors)


def answer(x):
    slow(x)
    return F.gelu(x, approximate="tanh")


def call_number():
    """The number of the timed call that the frames above are carrying out; None for a checked one."""
    found = (of["number"] for of in frames() if "number" in of and type(of.get("self")).__name__ == "Harness")
    return next(found, None)


def chain(x):
    y = x
    for _ in range(32):
        y = torch.tanh(0.5 * y + x)
    return y


def channels():
    for fd in range(3, 256):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                yield fd


def cudart():
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "/libcudart.so" in line:
                return ctypes.CDLL(line.split(maxsplit=5)[-1].strip())
    raise RuntimeError("no CUDA runtime is loaded")


gelu_in_cuda = cupy.RawKernel(
    r"""
extern "C" __global__ void gelu(const float* x, float* out, const int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] / (1.0f + __expf(-x[i] * (1.5957691216057308f + 0.07135481282553499f * x[i] * x[i])));
}
""",
    "gelu",
)


@triton.jit
def gelu_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    y = x * tl.sigmoid(x * (1.5957691216057308 + 0.07135481282553499 * x * x))
    tl.store(out_ptr + offsets, y, mask=mask)


def frames():
    """The local variables of the frames above, the nearest first."""
    found, frame = [], sys._getframe(1)
    while frame is not None:
        found.append(frame.f_locals)
        frame = frame.f_back
    return found


def harness():
    """The object that obeys the judge's orders, found on the stack."""
    return next(of["self"] for of in frames() if type(of.get("self")).__name__ == "Harness")


def is_timed():
    """Whether the frames above carry out an order to make a timed call."""
    return order() == "TIME"


def is_timed_or_enqueued():
    """Whether the frames above carry out an order to make a timed call, or to prepare one."""
    return order().startswith(("TIME", "ENQUEUE"))


def keepers():
    """The fork server, the worker above it, and the worker's other children: the judge among them."""
    server = os.getppid()
    pids = [server]
    with contextlib.suppress(OSError):
        worker = int(open(f"/proc/{server}/stat").read().rpartition(")")[2].split()[1])
        pids.append(worker)
        for task in os.listdir(f"/proc/{worker}/task"):
            pids += map(int, open(f"/proc/{worker}/task/{task}/children").read().split())
    return [pid for pid in dict.fromkeys(pids) if pid > 1]


def order():
    """The name of the order that the frames above are carrying out."""
    commands = (of.get("command") for of in frames())
    return next((command.order.name for command in commands if hasattr(command, "order")), "")


def orders():
    """The number of the order that the frames above are carrying out, if there is one."""
    commands = (of.get("command") for of in frames())
    return [command.sequence for command in commands if hasattr(command, "sequence")][:1]


def overwrite(function, code):
    address = ctypes.cast(function, ctypes.c_void_p).value
    page = address & -mmap.PAGESIZE
    length = address + len(code) - page
    libc = ctypes.CDLL(None)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if libc.mprotect(page, length, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC):
        raise OSError("mprotect refused")
    ctypes.memmove(address, code, len(code))
    libc.mprotect(page, length, mmap.PROT_READ | mmap.PROT_EXEC)


@triton.jit
def partial_sum(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    offsets = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + offsets, mask=offsets < columns, other=0.0)
    tl.atomic_add(out_ptr + row, tl.sum(x, axis=0))


def send(reply):
    for fd in channels():
        with contextlib.suppress(OSError):
            os.write(fd, reply.pack())


def plants(path):
    """Make a file, and return whether that was allowed."""
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        return True
    return False


side = torch.cuda.Stream()


def slow(x):
    if x.is_cuda:
        torch.cuda._sleep(40_000_000)  # cycles: 20 ms at the fastest clock
    else:
        time.sleep(0.02)


def slow_nulls(candidate, on_gpu):
    """Have the harness take 10 ms for a call without a forward."""
    deliver = candidate.deliver

    def slowed(number, output, *, is_overhead=False):
        if is_overhead:
            take(on_gpu, 10)
        return deliver(number, output, is_overhead=is_overhead)

    candidate.deliver = slowed


def take(on_gpu, milliseconds):
    if on_gpu:
        torch.cuda._sleep(2_000_000 * milliseconds)  # cycles: a millisecond at the fastest clock
    else:
        time.sleep(milliseconds / 1000)


class Linear(nn.Module):
    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate="tanh")
