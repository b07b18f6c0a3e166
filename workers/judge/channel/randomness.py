"""Seeds of the random generators, the same in judge and sealed process, and kinds of input draws.

Seeding takes microseconds here. ``torch.manual_seed`` also checks for absent accelerators, which takes longer than a
kernel.
"""

from __future__ import annotations

from typing import Final

import torch

#: Kinds of values that replace a problem's own inputs of any size. They stay in the range of the problem's own values
#: and need little additional memory. Of ``STEADY``, inputs are not all nearly equal, and indices stay indices.
STEADY: Final = ("blocks", "clustered", "divided", "skewed")
ANY_SIZE: Final = ("sparse", "few", *STEADY)
#: Kinds that bring each draw close to an end of its range or leave it unchanged, in different combinations.
ENDS: Final = ("ends_0", "ends_1", "ends_2")
#: Other kinds of values that replace a problem's own inputs, and can be outside of its domain.
KINDS: Final = ("scaled", "uniform", "integers", "adversarial")
#: The first of these with a smaller factor. It replaces them where not all exact answers fit into memory.
LARGER: Final = "larger"
#: Name for the smallest of ``REGIONS`` that changes the reference's answer.
REGION: Final = "region"
#: Kind that changes each value by a rounding error.
NUDGED: Final = "nudged"
#: Kinds that change the values of one region, with the region's share of all values.
REGIONS: Final = {"region_4096": 1 / 4096, "region_256": 1 / 256, "region_16": 1 / 16}
#: Kind that changes one value at a given position.
POKED: Final = "poked"
#: Kind that changes the values around a given position.
AROUND: Final = "around"


def set_seed(seed: int) -> None:
    """Seed the CPU's generator, and the GPU's if CUDA is initialised."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)
