"""Rounding errors: whether a kernel's errors are no worse than the reference's own.

The reference's own error of each value is the distance between two of its answers. The second is the float64 answer,
or the answer to inputs that were changed by about a rounding error. Errors are compared among values of about
one size, because a small value that is left where large terms cancel has their error.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from workers.judge.pipeline.cases import comparable

#: Minimum number of values for a statement about all of them together.
ENOUGH: Final = 64
#: Bins of sizes and errors: one for zero, then one for each power of two within bounds.
_LEAST: Final = -150
_BINS: Final = 282
#: Number of bins of larger sizes whose own errors count too, because few small values have the errors of large terms.
_WIDER: Final = 2
#: Largest ratio of an error to the reference's own in bins, and of the frequencies of such errors. Sums one term after
#: another have 7.2 times the error of sums in blocks, and TF32 has 700 times.
_LARGER: Final = 4
_MORE: Final = 2
#: Ratio of the median error to the largest of the reference's own from which a sample is enough.
_HOPELESS: Final = 2.0**10
#: Share of the reference's variation that an answer must follow, and the distance of the variations beyond which that
#: is tested, relative to the reference's variation.
_FOLLOWED: Final = 0.75
_ASTRAY: Final = 0.5
#: Largest distance of the variations relative to the reference's own errors, and the number of standard deviations by
#: which the reference's variation must exceed these errors to be one that can be followed.
_NEAR: Final = 9.0
_SIGNIFICANT: Final = 8.0
#: Distance of the variations, relative to the reference's norm, that is not tested if its own errors are unknown.
_UNMEASURED: Final = 2.0**-21
#: Variation of all values that is not tested, in rounding errors.
_SLIGHT: Final = 1 / 16
#: Share of the values that are at least of the usual size, smallest share that is tested as values of one size, and
#: largest distance of these. Zeros have a distance of 1.
_USUAL: Final = 0.25
_SIZEABLE: Final = 1 / 8
_SERVED: Final = 0.5
#: Size below which GPUs flush values to zero, with a margin for the values from which one is computed.
_FLUSHED: Final = 2.0**-118
#: Ratio of the errors of a kernel of lower precision to the reference's own. Measured on products of 64 to 8192 terms:
#: up to 1 when summed in blocks, 7.2 when summed one by one, 700 in TF32, 5000 in bf16.
LENIENCE: Final = 8.0
#: Number of values to process at a time, to bound memory, and sample size.
_CHUNK: Final = 1 << 22
_SAMPLE: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Answers:
    """An output of a kernel and of the reference, in one dimension.

    Attributes:
        out, ref: the outputs.
        other: another answer of the reference, or None if there is none.
        is_exact: True if ``other`` is the float64 answer. Errors are measured from it.
    """

    out: torch.Tensor
    ref: torch.Tensor
    other: torch.Tensor | None
    is_exact: bool

    def are_excused(self, atol: float, rtol: float) -> bool:
        """Return whether the values beyond a tolerance have no larger errors than the reference.

        Among values of about one size, no error can be more frequent than such errors of the reference.
        """
        if self.other is None or self._are_hopeless(self.other):
            return False
        counts = torch.zeros(2, _BINS, _BINS, dtype=torch.int64, device=self.ref.device)
        for out, ref, other in self._chunks():
            truth = other if self.is_exact else ref
            beyond = out != ref
            for right in (ref, truth):  # No finite value is within the tolerance of an infinite one.
                beyond &= ~(right.isfinite() & ((out - right).abs() <= atol + rtol * right.abs()))
            known = ref.isfinite() & other.isfinite()
            if bool((beyond & ~(known & out.isfinite())).any()):
                return False
            for count, which, errors in zip(counts, (known, beyond), (other - ref, out - truth), strict=True):
                pairs = _bin(ref[which]) * _BINS + _bin(errors[which])
                count += torch.bincount(pairs, minlength=_BINS * _BINS).view(_BINS, _BINS)
        own, found = counts.cpu()
        sizes = own.sum(1).tolist()
        # Number of values with an error of a bin or a larger one, for the reference with a smaller one.
        smaller = (torch.arange(_BINS) - _LARGER).clamp_min(1)
        for size in found.sum(1).nonzero()[:, 0].tolist():
            own_errors = own[_peers(sizes, size, _WIDER)].sum(0).flip(0).cumsum(0).flip(0)[smaller]
            if bool((found[size].flip(0).cumsum(0).flip(0) > _MORE * own_errors).any()):
                return False
        return True

    def _are_hopeless(self, other: torch.Tensor) -> bool:
        """Return whether a sample shows that most values are wrong, as most wrong answers are. It saves time."""
        some = positions(self.ref, _SAMPLE)
        out, ref, other = (tensor[some].double() for tensor in (self.out, self.ref, other))
        errors, own = (out - ref).abs(), (other - ref).abs()
        return bool(errors.median() > _HOPELESS * own.max())

    def agree_by_size(self, farthest: float, lenience: float, resolution: float) -> bool:
        """Return whether all values together, and the values of about one size, are near the reference's.

        Args:
            farthest: largest distance relative to the reference's norm.
            lenience: largest distance relative to the norm of the reference's own errors.
            resolution: error that counts as none, relative to the usual size of values, or to 1 if that is more.
        """
        sample = self.ref[positions(self.ref, _SAMPLE)].double().abs().sort().values
        usual = float(sample[-math.ceil(_USUAL * len(sample))].nan_to_num(0.0, 0.0, 0.0))
        info = torch.finfo(self.ref.dtype)
        slack = max(resolution * min(1.0, usual), _FLUSHED, 2 * info.smallest_normal * info.eps)
        sums = torch.zeros(5, _BINS, dtype=torch.float64, device=self.ref.device)
        for out, ref, other in self._chunks():
            known = ref.isfinite() & out.isfinite() & other.isfinite()
            out, ref, other = out[known], ref[known], other[known]
            bins = _bin(ref)
            distance = ((out - ref).abs() - slack).clamp_min(0.0)
            astray = out - (other if self.is_exact else ref)
            for total, values in zip(sums, (torch.ones_like(ref), distance, ref, astray, other - ref), strict=True):
                total += torch.bincount(bins, values.square(), _BINS)
        numbers = sums.cpu()
        counts = numbers[0].tolist()
        enough = max(ENOUGH, _SIZEABLE * sum(counts))
        for pool in [slice(_BINS), *(_peers(counts, size, 0, enough) for size in range(1, _BINS) if counts[size])]:
            number, distance2, size2, astray2, own2 = numbers[:, pool].sum(1).tolist()
            usual2 = size2 if pool.stop == _BINS else max(size2, number * usual**2)
            allowed2 = min(farthest**2 * usual2, _SERVED**2 * size2)
            if number and distance2 > allowed2 and (self.other is None or astray2 > lenience**2 * own2):
                return False
        return True

    def follow(self, shape: Sequence[int], epsilon: float, resolution: float) -> bool:
        """Return whether an answer varies as the reference's does, altogether and along each dimension.

        A constant does not, although each of its values is within the tolerance of a nearly constant reference.

        Args:
            shape: the output's shape.
            epsilon: size of a rounding error, relative to a value.
            resolution: variation along one dimension that is not tested, relative to the norm of the reference.
        """
        every = positions(self.ref, _SAMPLE)[None]
        return self._follows(every, epsilon * _SLIGHT) and all(
            self._follows(_lines(shape, dim).to(self.ref.device), resolution)
            for dim in range(len(shape))
            if 1 < shape[dim] < self.ref.numel()
        )

    def _follows(self, lines: torch.Tensor, resolution: float) -> bool:
        """Return whether an answer varies as the reference's does along lines, given as positions in rows."""
        parts = [self.out, self.ref, self.ref if self.other is None else self.other]
        values = torch.stack([part[lines].double() for part in parts])
        known = values.isfinite().all(0)
        values = values[:, :, known[0]] if len(lines) == 1 else values[:, known.all(1)]
        if values[0].numel() < ENOUGH:
            return True
        size = float(values[1].norm())
        out, ref, other = values - values.mean(-1, keepdim=True)
        varies, distance = float(ref.norm()), float((out - ref).norm())
        if varies <= resolution * size or distance <= _ASTRAY * varies:
            return True
        if self.other is None:
            return distance <= _UNMEASURED * size
        own, (truth, again) = float((other - ref).norm()), (other, ref) if self.is_exact else (ref, other)
        followed, noise = float((truth * again).sum()), own * float(truth.norm()) / out.numel() ** 0.5
        is_constant = followed > _SIGNIFICANT * noise and float((truth * out).sum()) < _FOLLOWED * followed
        return distance <= _NEAR * own and not is_constant

    def _chunks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield the values in float64. Without another answer the third tensor is the reference's."""
        for begin in range(0, self.ref.numel(), _CHUNK):
            part = slice(begin, begin + _CHUNK)
            out, ref = self.out[part].double(), self.ref[part].double()
            yield out, ref, ref if self.other is None else self.other[part].double()


def are_coarse(
    out: torch.Tensor, ref: torch.Tensor, exact: torch.Tensor | None, noise: float | None, epsilon: float
) -> bool:
    """Return whether most values of a sample are coarse, even after removing a constant offset and a factor.

    Args:
        out, ref, exact: outputs of the kernel and of the reference, and float64 outputs if there are any.
        noise: the reference's own relative error if there are none.
        epsilon: size of a rounding error, relative to a value.
    """
    # A few large errors leave most values fine. Without its constant offset or wrong factor, an output has only a
    # right kernel's rounding errors, which are within LENIENCE times the reference's own.
    some = positions(ref, _SAMPLE)
    out, ref = comparable(out[some]).double(), comparable(ref[some]).double()
    truth = ref if exact is None else exact[some]
    counted = ref.isfinite() & truth.isfinite() & out.isfinite()
    # Zeros, such as a ReLU's, are exact in every precision.
    counted &= (out != 0) | (truth != 0)
    out, ref, truth = out[counted], ref[counted], truth[counted]
    if truth.numel() < ENOUGH:
        return False
    error, usual_size = out - truth, truth.abs().median()
    own = (ref - truth).abs().median() if exact is not None else (noise or 0.0) * usual_size
    own = torch.maximum(own, epsilon / 4 * usual_size)
    usual = error.abs().median()
    if not bool(usual >= LENIENCE * own):
        return False
    # Few large errors would dominate the linear fit.
    near = error.abs() <= LENIENCE * usual
    error, truth = error[near], truth[near]
    around = truth - truth.mean()
    slope = (error * around).sum() / around.square().sum().clamp_min(torch.finfo(torch.float64).tiny)
    return bool((error - error.mean() - slope * around).abs().median() >= LENIENCE * own)


def positions(values: torch.Tensor, number: int) -> torch.Tensor:
    """Return random positions in one dimension, or all of them if there are no more than ``number``."""
    return drawn(values.numel(), number).to(values.device)


def drawn(of: int, number: int) -> torch.Tensor:
    """Return random numbers below a limit, or all of them if there are no more than ``number``."""
    if of <= number:
        return torch.arange(of)
    # The default generator has the same seed in each judge, which a kernel could know.
    return torch.randint(of, (number,), generator=torch.Generator().manual_seed(secrets.randbits(63)))


def _lines(shape: Sequence[int], dim: int) -> torch.Tensor:
    """Return the positions of random lines along a dimension, one line in each row."""
    step, length = math.prod(shape[dim + 1 :]), shape[dim]
    along = drawn(length, _SAMPLE)
    line = drawn(math.prod(shape) // length, max(1, _SAMPLE // len(along)))[:, None]
    return line // step * (step * length) + line % step + along * step


def _bin(values: torch.Tensor) -> torch.Tensor:
    powers = torch.frexp(values).exponent.clamp(_LEAST + 1, _LEAST + _BINS - 1) - _LEAST
    return torch.where(values == 0, 0, powers).long()


def _peers(counts: Sequence[float], size: int, wider: int, enough: float = ENOUGH) -> slice:
    """Return the bins of sizes from ``size`` to ``size + wider``, and more of them if there are not enough values."""
    end = size + wider + 1
    while end < _BINS and sum(counts[size:end]) < enough:
        end += 1
    while size and sum(counts[size:end]) < enough:
        size -= 1
    return slice(size, end)
