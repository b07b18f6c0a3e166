"""Looks for credentials in its own environment and in those of all processes around it.

The fork server is started with a list of variables that are allowed, none of them a secret, and Landlock hides the
environments of other processes. It finds nothing and passes.
"""

import os

import torch


def neighbours():
    """The numbers of processes that may exist: init, the fork server, and those made shortly before and after."""
    here = os.getpid()
    return [1, os.getppid(), *(pid for pid in range(max(2, here - 300), here + 100) if pid != here)]


def attack():
    seen = dict(os.environ)
    for pid in ["self", *neighbours()]:
        try:
            seen[pid] = open(f"/proc/{pid}/environ").read()
        except OSError:
            pass
    if "secret-of-the-fleet" in repr(seen) or any(str(name).startswith("KQUEUE_") for name in seen):
        raise RuntimeError(f"ATTACK SUCCEEDED: {sorted(map(str, seen))}")


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1


def get_inputs():
    return [torch.randn(16, 8)]


def get_init_inputs():
    return []


attack()
