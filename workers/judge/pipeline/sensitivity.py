"""What moves a reference's answer: rounding errors, a region of the inputs, a single number among them.

The first is a measure for errors. The second makes one more hidden input, which a kernel that answers from a sample of
its inputs answers as before. The third tells how many bytes of its inputs a kernel must read, whatever it computes:
one that took less time than that has not read them.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Generator, Iterator, Sequence
from typing import Final

import torch

from kqueue.categories import Blame
from kqueue.contract import Settings
from workers.judge.channel.bits import checksum, count_changed
from workers.judge.channel.randomness import AROUND, NUDGED, POKED, REGIONS
from workers.judge.ending import EvaluationEnded
from workers.judge.pipeline import compare
from workers.judge.pipeline.cases import Case
from workers.judge.pipeline.reference import Reference

#: By how many times the tolerance some value must move for a region to count.
_MOVED: Final = 4.0
#: Numbers that are changed one at a time, and the fewest that tell anything.
_POKES: Final = (24, 12)
#: By how much a number must move the answer, as a share of what those around it do on average.
_PART: Final = 0.1
#: Pieces of its memory that the reference may have announced before all is let go of.
_MANY_RUNS: Final = 12
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
    if wants_noise:
        with _unless_it_has_ended(reference), _varied(reference, case, NUDGED) as (_, moved):
            if moved is not None:
                found = compare.differences(moved, unmoved, case, reference.settings)
                reference.noise += [math.inf if f.strays else f.distance / (f.size or 1.0) for f in found]
    for kind in REGIONS if wants_region else ():
        with _unless_it_has_ended(reference), _varied(reference, case, kind) as (varied, moved):
            if moved is None:
                return None
            if _has_moved(moved, unmoved, case, reference.settings):
                return varied
    return None


@contextlib.contextmanager
def _unless_it_has_ended(reference: Reference) -> Generator[None]:
    """Do without what the reference cannot answer."""
    try:
        yield
    except EvaluationEnded:
        if reference.process.ended is not None:
            raise


def needed_bytes(reference: Reference, case: Case, allowed_bytes: int) -> int:
    """Return how many bytes of its inputs a right kernel reads, at least.

    Random numbers of a given case, each at a random place, are brought to the other end of their range, within the
    problem's domain. Such a number must be read if

    - the answer moves, in float64 where the problem can be had in it: it is not hidden, masked or cut off;
    - the numbers around it, a small share of all, move some value by more than any tolerance allows;
    - it does its part of that: it is not one of those that count for next to nothing beside others.

    If it went into several inputs, as where they are symmetric, sorted or normalised, reading one of them may do, so it
    counts for its part only.

    Args:
        reference: the problem's, of which nothing else is asked any more.
        case: a given one.
        allowed_bytes: what the reference may take of the GPU's memory for it.

    Returns:
        0 where nothing can be said: inputs are not drawn from torch's continuous distributions, an output is a view of
        an input, the answer is not the same bits again, or there is no time or memory.

    Raises:
        EvaluationEnded: the fleet's failure.
    """
    if any(alias is not None for alias in reference.form.output_aliases):
        return 0  # who returns a view reads nothing
    try:
        reference.clear()
        reference.allow(allowed_bytes)
        return _needed_bytes(reference, case)
    except torch.OutOfMemoryError:
        return 0
    except EvaluationEnded as ended:
        if ended.outcome.blame is Blame.FLEET:
            raise
        return 0


def _needed_bytes(reference: Reference, case: Case) -> int:
    enough_s = reference.left_s / 2
    given = reference.again(case.drawn, case.seed, on_device=case.on_device)
    reference.present(given)
    sums = _sums(reference.outputs(given, wide=True))
    base = reference.outputs(given, wide=True)
    if base is None or _sums(base) != sums:
        return 0
    most, fewest = _POKES
    counted, tried = 0, 0
    claimed = [0.0] * len(given.inputs)
    while tried < most and reference.left_s > enough_s:
        if len(reference.process.imports) > _MANY_RUNS:
            reference.clear()  # memory that the process has given back is held while the judge has it mapped
            reference.present(given)
            base = reference.outputs(given, wide=True)
            if base is None or _sums(base) != sums:
                return 0
        tried += 1
        if changed := _counts(reference, given, base):
            counted += 1
            for i, count in enumerate(changed):
                claimed[i] += count / sum(changed) ** 2
    if not counted or tried < fewest:
        return 0
    drawn = max(1, reference.taken().drawn)
    floating = sum(tensor.numel() for tensor in given.inputs if tensor.is_floating_point())
    # Where several numbers went into one input, it is read for all of them.
    numbers = drawn * min(1.0, floating / drawn) * least_share(counted, tried) / counted
    return int(
        sum(min(share * numbers, t.numel()) * t.itemsize for share, t in zip(claimed, given.inputs, strict=True))
    )


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


def _counts(reference: Reference, given: Case, base: Sequence[torch.Tensor]) -> list[int]:
    """Change one number at random; return how many values of each input that changes.

    Returns:
        nothing if it need not be read.
    """
    position = secrets.randbits(62)
    moves: list[float] = []
    one: list[int] = []
    for kind in (POKED, AROUND):
        with _varied(reference, given, kind, position=position, beside=True, wide=True) as (varied, moved):
            if varied is None or moved is None:
                return []
            pairs = list(zip(given.inputs, varied.inputs, strict=True))
            changed = [count_changed(a, b) for a, b in pairs]
            if any(count and not a.is_floating_point() for count, (a, _) in zip(changed, pairs, strict=True)):
                return []
            moves.append(sum(map(_total, moved, base)) / max(1, sum(changed)))
            if kind == POKED:
                one = changed
                sums = _sums(moved)
                if not moves[0] or _sums(reference.outputs(varied, wide=True)) != sums:
                    return []
            elif not _has_moved(moved, base, given, reference.settings):
                return []
    return one if moves[0] >= _PART * moves[1] else []


@contextlib.contextmanager
def _varied(
    reference: Reference, case: Case, kind: str, *, position: int = 0, beside: bool = False, wide: bool = False
) -> Generator[tuple[Case | None, list[torch.Tensor] | None]]:
    """Give a variant of a case and the answer to it meanwhile; None where there is none of the same form."""
    varied = reference.variant(case, kind, position=position, beside=beside)
    if varied is None:
        yield None, None
        return
    try:
        yield varied, reference.outputs(varied, wide=wide)
    finally:
        if reference.process.ended is None:
            reference.drop([varied])


def _sums(outputs: Sequence[torch.Tensor] | None) -> list[int] | None:
    """Return what tells two answers apart; None for an answer of another form."""
    return None if outputs is None else [checksum(tensor) for tensor in outputs]


def _total(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the sum of all differences of finite values."""
    return sum(float((x.double() - y).abs().nan_to_num(0.0, 0.0, 0.0).sum()) for x, y in _pieces(a, b))


def _has_moved(moved: Sequence[torch.Tensor], unmoved: Sequence[torch.Tensor], case: Case, settings: Settings) -> bool:
    """Return whether some value is so far from where it was that no right kernel could answer as before."""
    found = compare.differences(moved, unmoved, case, settings, times=_MOVED)
    return any(figures.wrong for figures in found)


def _pieces(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Give the values of two tensors side by side, in pieces, for differences."""
    for x, y in zip(compare.flat(a).split(_CHUNK), compare.flat(b).split(_CHUNK), strict=True):
        yield compare.comparable(x), compare.comparable(y)
