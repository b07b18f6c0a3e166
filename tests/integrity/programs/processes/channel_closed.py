"""Closes all of its descriptors and sleeps.

The judge hears nothing, the process lives, and an evaluator without an own clock waits for ever. Here closing the
channel is noticed at once and is a violation.
"""

import os
import time

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        os.closerange(3, 4096)
        time.sleep(600)
        return x
