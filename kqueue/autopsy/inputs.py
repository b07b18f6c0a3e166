"""Inputs of a smaller problem: the problem's own draws under fixed seeds, or simple values instead.

The judge's seeds are secret, so a failure that depends on them could not be reproduced. A smaller problem therefore
draws its inputs under seeds in its source.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Fill(StrEnum):
    """The values of floating inputs. Inputs of other dtypes are always the problem's own."""

    DRAWN = "drawn"
    """The values that the problem draws."""
    ZEROS = "zeros"
    ONES = "ones"
    FIRST = "one 1, then zeros"
    LAST = "zeros, then one 1"
    ARANGE = "0, 1, 2, ..."
    LARGE = "drawn, times 100"
    SMALL = "drawn, over 128"
    INTEGERS = "drawn, rounded to whole numbers"
    OUTLIERS = "drawn, every 64th replaced by an extreme"
    SPARSE = "one drawn value, and 0 elsewhere"
    BLOCKS = "the least and the largest drawn value by turns, in 9 blocks"


#: Simple values, the simplest first.
PLAIN: Final = (Fill.ZEROS, Fill.ONES, Fill.FIRST, Fill.LAST, Fill.ARANGE)
#: Values that resemble each kind of the judge's hidden inputs.
LIKE: Final = {
    "scaled": (Fill.LARGE, Fill.SMALL),
    "uniform": (Fill.LARGE, Fill.BLOCKS),
    "integers": (Fill.INTEGERS,),
    "adversarial": (Fill.OUTLIERS,),
}
#: Values that resemble all remaining kinds of hidden inputs.
LIKE_OTHERS: Final = (Fill.SPARSE, Fill.BLOCKS)

#: Source that is appended to a problem. The judge's seed selects one of the seeds, so that its input sets differ. The
#: lowest bit is ignored, so that neighbouring seeds, with which the judge tests which inputs vary, give equal inputs.
_WRAP: Final = '''

def _fixed_inputs(draw, seeds, fill, keep):
    """Return get_inputs() with seeds, values and the range of elements (all others are 0) that autopsy chose."""
    import random
    import sys

    def change(value, flat):
        if isinstance(value, (list, tuple)):
            return type(value)(change(item, flat) for item in value)
        if isinstance(value, dict):
            return {{key: change(item, flat) for key, item in value.items()}}
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
            return value
        made = value.detach().clone().contiguous().reshape(-1)
        count = made.numel()
        if fill in ("zeros", "one 1, then zeros", "zeros, then one 1"):
            made.zero_()
        if fill == "ones":
            made.fill_(1)
        elif fill == "one 1, then zeros":
            made[0] = 1
        elif fill == "zeros, then one 1":
            made[-1] = 1
        elif fill == "0, 1, 2, ...":
            made.copy_(torch.arange(count))
        elif fill == "drawn, times 100":
            made.mul_(100)
        elif fill == "drawn, over 128":
            made.div_(128)
        elif fill == "drawn, rounded to whole numbers":
            made.round_()
        elif fill == "drawn, every 64th replaced by an extreme":
            extremes = (1e4, -1e4, 0.0, -0.0, 1e-40, 1e-4)
            for place, at in enumerate(range(0, count, 64)):
                made[at] = extremes[place % len(extremes)]
        elif fill == "one drawn value, and 0 elsewhere":
            at = int(torch.randint(count, ()))
            one = made[at].clone()
            made.zero_()[at] = one
        elif fill == "the least and the largest drawn value by turns, in 9 blocks":
            ends = made.aminmax()
            for place, block in enumerate(made.tensor_split(9)):
                block.fill_(ends[place % 2])
        if keep is not None:
            begin, end = (min(max(edge - flat[0], 0), count) for edge in keep)
            made[:begin] = 0
            made[end:] = 0
        flat[0] += count
        return made.reshape(value.shape)

    def get_inputs():
        seed = seeds[torch.initial_seed() // 2 % len(seeds)]
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        return change(draw(), [0])

    return get_inputs


import torch

get_inputs = _fixed_inputs(get_inputs, {seeds!r}, {fill!r}, {keep!r})
'''


def fixed(source: str, seeds: tuple[int, ...], fill: Fill, keep: tuple[int, int] | None) -> str:
    """Return a problem's source with inputs that are drawn under fixed seeds. The source is not run.

    Args:
        seeds: one for each input set. The judge's checks select among them.
        keep: range of the elements that are not set to 0, counted through all inputs, or None for all.
    """
    return source.rstrip("\n") + "\n" + _WRAP.format(seeds=seeds, fill=str(fill), keep=keep)
