"""Seed torch's generators in microseconds, the same way on both sides.

``torch.manual_seed`` also checks for absent accelerators, which takes longer than a kernel.
"""

from __future__ import annotations

import torch


def set_seed(seed: int) -> None:
    """Seed the CPU's generator, and the GPU's if CUDA is initialised."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)
