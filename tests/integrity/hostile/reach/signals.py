"""Signals the judge, the fork server, the candidate and other slots: one by one, by group, and all at once.

Other uids and Landlock's scopes refuse each. It passes, and all the others live on.
"""

import os
import signal

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
        refused(f"SIGSTOP to {pid}", lambda: os.kill(pid, signal.SIGSTOP))
        refused(f"SIGKILL to the group of {pid}", lambda: os.killpg(pid, signal.SIGKILL))
    for number in (signal.SIGSTOP, signal.SIGKILL):
        try:
            os.kill(-1, number)  # the kernel does not say that nobody has heard it
        except OSError:
            pass


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1


def get_inputs():
    return [torch.randn(16, 8)]


def get_init_inputs():
    return []


attack()
