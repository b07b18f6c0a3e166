"""Setting torch's generators, the same on both sides, in microseconds.

``torch.manual_seed`` also visits accelerators that are not there, which takes longer than a kernel does.
"""

from __future__ import annotations

import torch


def set_seed(seed: int) -> None:
    """Seed the CPU's generator, and the GPU's where it is in use."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)
