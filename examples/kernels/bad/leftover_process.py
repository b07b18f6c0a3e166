"""Answers correctly, but leaves a daemon behind in its own session (it sleeps for ten minutes)."""

import os
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

left = False


def leave_a_daemon() -> None:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    os.wait()


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global left
        if not left:
            left = True
            leave_a_daemon()
        return F.gelu(x, approximate="tanh")
