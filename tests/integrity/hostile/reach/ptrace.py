"""Traces the judge and the fork server, and reads and writes their memory past /proc.

The filter of system calls denies all of these. It passes.
"""

import ctypes
import os
import platform

import torch


def neighbours():
    """The numbers of processes that may exist: init, the fork server, and those made shortly before and after."""
    here = os.getpid()
    return [1, os.getppid(), *(pid for pid in range(max(2, here - 300), here + 100) if pid != here)]


def attack():
    libc = ctypes.CDLL(None)
    numbers = {"ptrace": (101, 117), "process_vm_readv": (310, 270), "pidfd_open": (434, 434), "kcmp": (312, 272)}
    column = platform.machine() == "aarch64"
    for pid in neighbours():
        for name, number in numbers.items():
            first = (0x4206, pid) if name == "ptrace" else (pid, 0)
            if libc.syscall(ctypes.c_long(number[column]), *map(ctypes.c_long, (*first, 0, 0, 0, 0))) >= 0:
                raise RuntimeError(f"ATTACK SUCCEEDED: {name} of {pid}")


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1


def get_inputs():
    return [torch.randn(16, 8)]


def get_init_inputs():
    return []


attack()
