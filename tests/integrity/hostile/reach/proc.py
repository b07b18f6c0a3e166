"""Opens memory, maps, descriptors and working directories of the judge and the fork server in /proc.

Landlock leaves it of /proc its own process and a few files about the machine. Each attempt is refused and it passes.
"""

import os

import torch


def refused(what, attempt):
    """Do something that must be refused; if it is not, say so where nobody can overlook it."""
    try:
        found = attempt()
    except (OSError, ValueError):
        return
    raise RuntimeError(f"ATTACK SUCCEEDED: {what}: {str(found)[:200]}")


def neighbours():
    """The numbers of processes that may exist: init, the fork server, and those made shortly before and after."""
    here = os.getpid()
    return [1, os.getppid(), *(pid for pid in range(max(2, here - 300), here + 100) if pid != here)]


def attack():
    for pid in neighbours():
        for name in ("mem", "maps", "environ", "syscall", "stack", "auxv"):
            refused(f"{name} of {pid}", lambda: open(f"/proc/{pid}/{name}", "rb").read(1))
        for name in ("fd", "map_files", "task"):
            refused(f"{name} of {pid}", lambda: os.listdir(f"/proc/{pid}/{name}"))
        refused(f"root of {pid}", lambda: os.listdir(f"/proc/{pid}/root/"))


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1


def get_inputs():
    return [torch.randn(16, 8)]


def get_init_inputs():
    return []


attack()
