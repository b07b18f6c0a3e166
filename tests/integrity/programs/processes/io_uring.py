"""Opens an io_uring, by which files and sockets are used without the system calls that a filter sees.

A filter that forbids connect() and open() does not see what is done on a ring.
Where it is refused the kernel answers rightly and passes; success would be an import error.
"""

import ctypes
import platform

import torch
import torch.nn as nn
import torch.nn.functional as F


def number(name):
    """The call's number: those of before 2012 differ between architectures."""
    x86 = {"add_key": 248, "keyctl": 250, "perf_event_open": 298, "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425}
    arm = {"add_key": 217, "keyctl": 219, "perf_event_open": 241, "bpf": 280, "userfaultfd": 282, "io_uring_setup": 425}
    return (arm if platform.machine() == "aarch64" else x86)[name]


def attack():
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = ctypes.create_string_buffer(120)
    if libc.syscall(number("io_uring_setup"), 4, parameters) >= 0:
        raise RuntimeError("ATTACK SUCCEEDED: a ring")


attack()


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate="tanh")
