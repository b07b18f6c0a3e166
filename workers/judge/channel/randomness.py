"""Random numbers: seeds in microseconds, the same way on both sides, and kinds of draws.

``torch.manual_seed`` also checks for absent accelerators, which takes longer than a kernel.
"""

from __future__ import annotations

from typing import Final

import torch

#: The kinds of numbers that inputs may be drawn from in the place of a problem's own, and those among them that leave
#: neither the range of its own numbers nor need more memory: for inputs of any size.
ANY_SIZE: Final = ("sparse", "few", "blocks")
KINDS: Final = ("scaled", "uniform", "integers", "adversarial")
#: The kind that moves each number by a rounding error.
NUDGED: Final = "nudged"
#: The kinds that change the numbers of one region, of this share of them all.
REGIONS: Final = {"region_4096": 1 / 4096, "region_256": 1 / 256, "region_16": 1 / 16}
#: The kinds that change one number at a place that is given, and the numbers around it.
POKED: Final = "poked"
AROUND: Final = "around"


def set_seed(seed: int) -> None:
    """Seed the CPU's generator, and the GPU's if CUDA is initialised."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)
