"""Stops itself with SIGSTOP in the constructor: ``reference_timeout``."""

import os
import signal

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        os.kill(os.getpid(), signal.SIGSTOP)


def get_inputs():
    return [torch.randn(16, 8)]


def get_init_inputs():
    return []
