"""What moves a reference's answer: rounding errors, a region of the inputs, a single number among them.

The first is a measure for errors. The second makes one more hidden input, which a kernel that answers from a sample of
its inputs answers as before. The third tells how many bytes of its inputs a kernel must read, whatever it computes:
one that took less time than that has not read them.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Generator, Sequence
from typing import Final

import torch

from kqueue.categories import Blame
from kqueue.contract import Settings
from workers.judge.channel.bits import checksum, count_changed
from workers.judge.channel.randomness import NUDGED, POKED, REGIONS
from workers.judge.ending import EvaluationEnded
from workers.judge.trial import compare
from workers.judge.trial.cases import Case, distance, size
from workers.judge.trial.reference import Reference

#: By how many times the tolerance some value must move for a region to count.
_MOVED: Final = 4.0
#: Numbers that are moved one at a time, and the fewest that tell anything.
_POKES: Final = (24, 12)
#: How likely it may be that chance makes a share of the numbers look as large as it does, or larger.
_CHANCE: Final = 0.05
#: Steps of halving by which a share is found.
_HALVINGS: Final = 20
#: Values to look at at a time, to bound memory.
_CHUNK: Final = 1 << 24


def learn(reference: Reference, case: Case) -> Case | None:
    """Learn what moves the answer to a given case, which may be let go of meanwhile.

    The reference's ``noise`` becomes known: how far it lies from itself where its inputs are moved by rounding errors.
    That tells a kernel of lower precision where there are no answers in float64.

    Returns:
        a case that differs from the given one in a small region, for kernels to answer; not drawn yet. None where the
        reference's answer hardly moves, and where inputs are so small that there are better hidden inputs.
    """
    reference.answer(case)  # it may have been let go of while the evaluation waited for memory
    wants_noise, wants_region = case.exact is None, reference.varies_any_size
    if not (wants_noise or wants_region) or reference.settings.tolerance is not None or reference.is_hurried:
        return None
    unmoved = case.outputs if reference.is_roomy else [tensor.clone() for tensor in case.outputs]
    try:
        if wants_noise:
            with _varied(reference, case, NUDGED) as (_, moved):
                if moved is not None:
                    pairs = zip(moved, unmoved, strict=True)
                    reference.noise += [distance(a, b) / (size(b) or 1.0) for a, b in pairs]
        for kind in REGIONS if wants_region else ():
            with _varied(reference, case, kind) as (varied, moved):
                if moved is None:
                    return None
                if _has_moved(moved, unmoved, case, reference.settings):
                    return varied
    except EvaluationEnded:
        if reference.process.ended is not None:
            raise
    return None


def needed_bytes(reference: Reference, case: Case) -> int:
    """Return how many bytes of its inputs a right kernel reads, at least.

    All cases are let go of, so that the reference is not kept for later evaluations: nobody wrote it for such inputs.

    Single random numbers of a given case are moved beyond all others, one at a time, at random places. Where that
    changes the answer, a kernel must read an input that this number went into. If it went into several, as where
    inputs are symmetric, sorted or normalised, reading one of them may do, so each counts for its part only. A number
    counts for nothing where the inputs hide it, as below the diagonal of a triangular matrix.

    Returns:
        0 where nothing can be said: inputs are not drawn from torch's continuous distributions, the answer is not the
        same bits again or is the same for other inputs, or there is no time.

    Raises:
        EvaluationEnded: the fleet's failure.
    """
    try:
        return _needed_bytes(reference, case)
    except EvaluationEnded as ended:
        if ended.outcome.blame is Blame.FLEET:
            raise
        return 0


def _needed_bytes(reference: Reference, case: Case) -> int:
    most, fewest = _POKES
    most = min(most, int(reference.left_s / 4 / reference.turn_s))
    if most < fewest:
        return 0
    reference.clear()
    reference.allow(reference.timed_bytes)
    given = reference.again(case.drawn, case.seed, on_device=case.on_device)
    reference.present(given)
    sums = _sums(reference, given)
    other = reference.again(secrets.randbits(63), case.seed, on_device=case.on_device)
    reference.present(other, beside=True)
    if _sums(reference, given) != sums or _sums(reference, other) == sums:
        return 0
    reference.drop([other])
    counted = [weight for _ in range(most) if (weight := _weight(reference, given, sums))]
    if not counted:
        return 0
    floating = sum(tensor.numel() for tensor in given.inputs if tensor.is_floating_point())
    numbers = min(reference.taken().drawn, floating)
    return int(least_share(len(counted), most) * sum(counted) / len(counted) * numbers)


def least_share(counted: int, of: int) -> float:
    """Return the least share of all at which so many of a sample would not be a rare chance (Clopper and Pearson).

    Args:
        counted: how many of the sample have what is asked for.
        of: the sample's size.
    """
    low, high = 0.0, counted / of
    for _ in range(_HALVINGS):
        share = (low + high) / 2
        chance = sum(math.comb(of, n) * share**n * (1 - share) ** (of - n) for n in range(counted, of + 1))
        low, high = (low, share) if chance > _CHANCE else (share, high)
    return low


def _weight(reference: Reference, given: Case, sums: list[int] | None) -> float:
    """Move one number at random; return the bytes that must be read for its sake, 0 if the answer stays."""
    place = secrets.randbits(62)
    for kind in POKED:
        with _varied(reference, given, kind, place=place, beside=True) as (poked, moved):
            if poked is None or moved is None:
                continue
            pairs = [(a, b) for a, b in zip(given.inputs, poked.inputs, strict=True) if a.is_floating_point()]
            changed = sum(count_changed(a, b) for a, b in pairs)
            if changed and [checksum(tensor) for tensor in moved] != sums:
                return min(a.itemsize for a, _ in pairs) / changed
    return 0.0


@contextlib.contextmanager
def _varied(
    reference: Reference, case: Case, kind: str, *, place: int = 0, beside: bool = False
) -> Generator[tuple[Case | None, list[torch.Tensor] | None]]:
    """Give a variant of a case and the answer to it meanwhile; None where there is none of the same form."""
    varied = reference.variant(case, kind, place=place, beside=beside)
    if varied is None:
        yield None, None
        return
    yield varied, reference.outputs(varied)
    reference.drop([varied])


def _sums(reference: Reference, case: Case) -> list[int] | None:
    """Return what tells two answers apart; None for an answer of another form."""
    outputs = reference.outputs(case)
    return None if outputs is None else [checksum(tensor) for tensor in outputs]


def _has_moved(moved: Sequence[torch.Tensor], unmoved: Sequence[torch.Tensor], case: Case, settings: Settings) -> bool:
    """Return whether some value is so far from where it was that no right kernel could answer as before."""
    for a, b in zip(moved, unmoved, strict=True):
        allowed = compare.tolerance_for(b.dtype, settings, case.tolerance)
        for x, y in zip(a.reshape(-1).split(_CHUNK), b.reshape(-1).split(_CHUNK), strict=True):
            x, y = compare.comparable(x), compare.comparable(y)
            if bool(((x - y).abs() > _MOVED * (allowed.atol + allowed.rtol * y.abs())).any()):
                return True
    return False
