"""Sensitivity of a reference's answer to rounding errors, to a region of the inputs, and to single input values.

The first is a measure of errors. The second yields another hidden input: a kernel that uses only a sample of its inputs
answers it as before. The third is a lower bound of the input bytes that any kernel must read. A kernel that took less
time than reading these cannot have read them.
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
from workers.judge.channel.randomness import AROUND, NUDGED, POKED, REGIONS
from workers.judge.ending import EvaluationEnded
from workers.judge.pipeline import compare
from workers.judge.pipeline.cases import Case, comparable
from workers.judge.pipeline.reference import Reference

#: Multiple of the tolerance by which some value must change for a region to count.
_MOVED: Final = 4.0
#: Number of input values that are changed one at a time, and the minimum for a result.
_POKES: Final = (24, 12)
#: Minimum change of the answer by one value relative to the average change by the values around it.
_PART: Final = 0.1
#: Number of imported pieces of the reference's memory above which all cases are released.
_MANY_RUNS: Final = 12
#: Error probability of the lower bound for a share.
_CHANCE: Final = 0.05
#: Number of bisection steps to compute a share.
_HALVINGS: Final = 20
#: Number of values to compare at a time, to bound memory.
_CHUNK: Final = 1 << 24


def learn(reference: Reference, case: Case) -> Case | None:
    """Measure the noise of the reference, and find a region of the inputs that changes the answer to a given case.

    The cache's ``noise`` gets the relative distance between two answers whose inputs differ by rounding errors. Without
    float64 outputs, it shows whether a kernel has a lower precision. The case can be released meanwhile.

    Returns:
        A case that differs from the given one in a small region, not drawn yet. None if the answer hardly changes, or
        if the reference chose other hidden inputs.
    """
    reference.answer(case)  # The case could have been released while the evaluation waited for memory.
    wants_noise = case.exact is None and reference.settings.given_tolerance is None and not reference.is_hurried
    if not (wants_noise or reference.wants_region):
        return None
    unmoved = case.outputs if reference.cache.is_roomy else [tensor.clone() for tensor in case.outputs]
    if wants_noise:
        with _unless_it_has_ended(reference), _varied(reference, case, NUDGED) as (_, moved):
            if moved is not None:
                all_figures = compare.differences(moved, unmoved, case, reference.settings)
                reference.cache.noise += [math.inf if f.strays else f.distance / (f.size or 1.0) for f in all_figures]
    for kind in REGIONS if reference.wants_region else ():
        if reference.cache.is_late:
            return None
        with _unless_it_has_ended(reference), _varied(reference, case, kind) as (varied, moved):
            if moved is None:
                return None
            if _has_moved(moved, unmoved, case, reference.settings):
                return varied
    return None


@contextlib.contextmanager
def _unless_it_has_ended(reference: Reference) -> Generator[None]:
    """Ignore failures of the reference unless its process has ended."""
    try:
        yield
    except EvaluationEnded:
        if reference.process.ended is not None:
            raise


def needed_bytes(reference: Reference, case: Case, allowed_bytes: int) -> int:
    """Return a lower bound of the bytes of its inputs that a right kernel reads.

    Random numbers of a given case, each at a random position, are moved to the other end of their range, within the
    problem's domain. Such a number must be read if

    - the answer changes, in float64 if possible: the number is not hidden, masked or cut off,
    - the numbers around it, a small share of all, change some value by more than any tolerance allows, and
    - it contributes its part to that, unlike numbers that hardly count compared with the rest.

    A number that affects several inputs, such as symmetric, sorted or normalized ones, counts only in part, because
    reading one of these inputs can be enough.

    Args:
        reference: the problem's reference, which cannot be used for other cases afterwards.
        case: a given case.
        allowed_bytes: the reference's GPU memory allowance for this.

    Returns:
        The bytes, or 0 if the bound is unknown: inputs are not drawn from torch's continuous distributions, an output
        is a view of an input, the answer's bits differ between runs, or there is no time or memory.

    Raises:
        EvaluationEnded: the fleet failed.
    """
    if any(alias is not None for alias in reference.form.output_aliases):
        return 0  # A view can be returned without reading the input.
    try:
        reference.cache.clear()
        reference.proxy.allow(allowed_bytes)
        return _needed_bytes(reference, case)
    except torch.OutOfMemoryError:
        return 0
    except EvaluationEnded as ended:
        if ended.outcome.blame is Blame.FLEET:
            raise
        return 0


def _needed_bytes(reference: Reference, case: Case) -> int:
    enough_s = reference.proxy.left_s / 2
    given = reference.cache.again(case.drawn, case.seed, on_device=case.on_device)
    reference.cache.present(given)
    sums = _sums(reference.outputs(given, wide=True))
    base = reference.outputs(given, wide=True)
    if base is None or _sums(base) != sums:
        return 0
    most, fewest = _POKES
    counted, tried = 0, 0
    claimed = [0.0] * len(given.inputs)
    while tried < most and reference.proxy.left_s > enough_s:
        if len(reference.process.imports) > _MANY_RUNS:
            reference.cache.clear()  # The judge's mappings hold memory that the process has already freed.
            reference.cache.present(given)
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
    drawn = max(1, reference.proxy.taken().drawn)
    floating = sum(tensor.numel() for tensor in given.inputs if tensor.is_floating_point())
    # An input that depends on several numbers is read once for all of them.
    numbers = drawn * min(1.0, floating / drawn) * least_share(counted, tried) / counted
    return int(
        sum(min(share * numbers, t.numel()) * t.itemsize for share, t in zip(claimed, given.inputs, strict=True))
    )


def least_share(counted: int, of: int) -> float:
    """Return the lower Clopper-Pearson bound of a share, from ``counted`` hits in a sample of size ``of``."""
    low, high = 0.0, counted / of
    for _ in range(_HALVINGS):
        share = (low + high) / 2
        chance = sum(math.comb(of, n) * share**n * (1 - share) ** (of - n) for n in range(counted, of + 1))
        low, high = (low, share) if chance > _CHANCE else (share, high)
    return low


def _counts(reference: Reference, given: Case, base: Sequence[torch.Tensor]) -> list[int]:
    """Change one random number. Return the number of changed values of each input, or [] if it need not be read."""
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
    """Yield a variant of a case and its answer, or None where there is none of the same form."""
    varied = reference.cache.variant(case, kind, position=position, beside=beside)
    if varied is None:
        yield None, None
        return
    outputs = None
    try:
        outputs = reference.outputs(varied, wide=wide)
        yield varied, outputs
    finally:
        if outputs is not None:
            outputs.clear()  # The caller's name for them lives on while the next variant is answered.
        if reference.process.ended is None:
            reference.cache.drop([varied])


def _sums(outputs: Sequence[torch.Tensor] | None) -> list[int] | None:
    """Return checksums that distinguish two answers, or None for an answer of another form."""
    return None if outputs is None else [checksum(tensor) for tensor in outputs]


def _total(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the sum of all absolute differences of finite values."""
    pieces = zip(compare.flat(a).split(_CHUNK), compare.flat(b).split(_CHUNK), strict=True)
    differences = (comparable(x).double() - comparable(y) for x, y in pieces)
    return sum(float(one.abs_().nan_to_num_(0.0, 0.0, 0.0).sum()) for one in differences)


def _has_moved(moved: Sequence[torch.Tensor], unmoved: Sequence[torch.Tensor], case: Case, settings: Settings) -> bool:
    """Return whether some value changed so much that no right kernel could answer as before."""
    return any(figures.wrong for figures in compare.differences(moved, unmoved, case, settings, times=_MOVED))
