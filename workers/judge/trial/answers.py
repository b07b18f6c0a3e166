"""What the judge makes of a reference's answers: whether they agree with those in float64, and can be relied on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from kqueue.contract import Precision, Settings
from workers.judge.channel.bits import checksum
from workers.judge.trial import compare
from workers.judge.trial.cases import CLOSE, DTYPES, Case, distance, is_tame, size

#: How far the reference may lie from itself in float64, as a share of its size: for that to tell anything, and for
#: a variant to count.
_RELATED: Final = {Precision.FP32: 1e-2, Precision.FP16: 0.25, Precision.BF16: 0.25}
_PRECISE: Final = {Precision.FP32: 1e-3, Precision.FP16: 3e-2, Precision.BF16: 3e-2}
#: How far its answer may move when the inputs move by less than a rounding error, value by value, as a share. A right
#: kernel rounds more than once, so this is some times less than a kernel may be off.
_STEADY: Final = {precision: close / 3 for precision, close in CLOSE.items()}
#: Values to look at at a time, to bound memory.
_CHUNK: Final = 1 << 24
#: Values of the answer that is looked at for the sake of the kernels that this loads.
_FEW: Final = 1 << 12


def has_nan(tensor: torch.Tensor) -> bool:
    """Return whether there is a NaN, without a mask of the tensor's size."""
    pieces = tensor.reshape(-1).split(_CHUNK) if tensor.numel() > _CHUNK else (tensor,)
    return any(bool(torch.isnan(piece).any()) for piece in pieces)


def is_related(outputs: Sequence[torch.Tensor], exact: Sequence[torch.Tensor], precision: Precision) -> bool:
    """Return whether outputs are a less precise form of the exact ones, be they rounding errors only."""
    share, close = _RELATED[precision], CLOSE[precision]
    return all(
        (apart := distance(own, wide)) <= share * size(wide) or apart <= close * own.numel() ** 0.5
        for own, wide in zip(outputs, exact, strict=True)
        if own.is_floating_point() or own.is_complex()
    )


def is_precise(outputs: Sequence[torch.Tensor], exact: Sequence[torch.Tensor], precision: Precision) -> bool:
    """Return whether the outputs for a variant are near the exact ones, and far from overflowing."""
    share = _PRECISE[precision]
    return all(
        # Not so indices: those of equal values may be any.
        (own.is_floating_point() or own.is_complex()) and is_tame(own) and distance(own, wide) <= share * size(wide)
        for own, wide in zip(outputs, exact, strict=True)
    )


def is_steady(exact: Sequence[torch.Tensor], nudged: Sequence[torch.Tensor], precision: Precision) -> bool:
    """Return whether inputs that differ by less than a rounding error have the same answer; not so at steps."""
    close = _STEADY[precision]
    pairs = [(a, b, b.abs()) for a, b in zip(nudged, exact, strict=True) if b.numel()]
    return all(
        bool(((a - b).abs() <= close * (b_size + b_size.square().mean().sqrt())).all()) for a, b, b_size in pairs
    )


def rehearse(settings: Settings) -> None:
    """Look at a small answer as at a reference's.

    That loads the judge's own kernels, which takes milliseconds each, when they are used for the first time.
    """
    answer = torch.ones(_FEW, dtype=DTYPES[settings.precision], device="cuda")
    exact = answer.double()
    case = Case(seed=0, outputs=[answer], exact=[exact])
    has_nan(answer)
    checksum(answer)
    is_related([answer], [exact], settings.precision)
    is_precise([answer], [exact], settings.precision)
    is_steady([exact], [exact], settings.precision)
    compare.check_values([answer.clone()], case, settings)
