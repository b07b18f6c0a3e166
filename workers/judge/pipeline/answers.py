"""What the judge makes of a reference's answers: whether they agree with those in float64, and can be relied on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from kqueue.contract import Precision, Settings
from workers.judge.channel.bits import checksum, extremes
from workers.judge.gpu import onepass
from workers.judge.pipeline import compare
from workers.judge.pipeline.cases import CLOSE, DTYPES, Case, distance, size

#: How far the reference may lie from itself in float64, as a share of its size: for that to tell anything, and for
#: a variant to count.
_RELATED: Final = {Precision.FP32: 1e-2, Precision.FP16: 0.25, Precision.BF16: 0.25}
_PRECISE: Final = {Precision.FP32: 1e-3, Precision.FP16: 3e-2, Precision.BF16: 3e-2}
#: How far its answer may move when the inputs move by less than a rounding error, value by value, as a share. A right
#: kernel rounds more than once, so this is some times less than a kernel may be off.
_STEADY: Final = {precision: close / 3 for precision, close in CLOSE.items()}
#: Values that tell whether the model in float64 is the same: fewer may be near zero by chance, all of them.
_TELLING: Final = 64
#: Values of the answer that is looked at for the sake of the kernels that this loads.
_FEW: Final = 1 << 12


@dataclass(slots=True)
class Look:
    """What is to be known of one answer. All that is to be known of many is waited for once (:func:`look_at`).

    Attributes:
        outputs: the answer.
        exact: the answer in float64; None where there is none, or it does not matter.
        nudged: the same to inputs that are moved by less than a rounding error, likewise.
        first: an earlier answer to compare with, likewise.
        varied: whether it is to inputs unlike the problem's own.
        precision: the evaluation's.
        numbers: what was found, by name.
    """

    outputs: Sequence[torch.Tensor]
    exact: Sequence[torch.Tensor] | None
    nudged: Sequence[torch.Tensor] | None
    first: Sequence[torch.Tensor] | None
    varied: bool
    precision: Precision
    numbers: dict[str, float] = field(default_factory=dict[str, float])

    def measure(self) -> dict[str, torch.Tensor]:
        """Return the numbers on the device, by name, without waiting for it."""
        found: dict[str, torch.Tensor] = {}
        for number, own in enumerate(self.outputs):
            if self.first is not None:
                found[f"since {number}"] = distance(own, self.first[number])
                found[f"first {number}"] = size(self.first[number])
            if not (own.is_floating_point() or own.is_complex()):
                continue
            if own.numel():
                low, high = extremes(own)
                if own.is_floating_point():
                    found[f"nan {number}"] = low.isnan()
                if self.varied:
                    found[f"wild {number}"] = torch.maximum(-low, high) >= torch.finfo(own.dtype).max / 64
            if self.exact is not None:
                found[f"apart {number}"] = distance(own, self.exact[number])
                found[f"size {number}"] = size(self.exact[number])
                if self.nudged is not None and own.numel():
                    found[f"moves {number}"] = ~_is_steady(self.exact[number], self.nudged[number], self.precision)
        return found

    @property
    def has_nan(self) -> bool:
        """Whether there is a NaN."""
        return self._any("nan")

    @property
    def is_tame(self) -> bool:
        """Whether all values of an answer to varied inputs are far from overflowing."""
        return not self._any("nan") and not self._any("wild")

    @property
    def is_precise(self) -> bool:
        """Whether an answer to varied inputs is near the exact one, and far from overflowing."""
        share = _PRECISE[self.precision]
        return self.is_tame and all(
            # Not so indices: those of equal values may be any.
            (apart := self.numbers.get(f"apart {number}")) is not None
            and apart <= share * self.numbers[f"size {number}"]
            for number in range(len(self.outputs))
        )

    @property
    def is_steady(self) -> bool:
        """Whether inputs that differ by less than a rounding error have the same answer; not so at steps."""
        return self.nudged is not None and not self._any("moves")

    @property
    def is_as_first(self) -> bool:
        """Whether the answer is the earlier one, within the tolerance."""
        share = CLOSE[self.precision]
        return all(
            self.numbers[f"since {number}"] <= share * self.numbers[f"first {number}"]
            for number in range(len(self.outputs))
        )

    def _any(self, what: str) -> bool:
        return any(value for name, value in self.numbers.items() if name.startswith(what))


@dataclass(slots=True)
class Relation:
    """Whether a problem's own answers are a less precise form of the exact ones, be they rounding errors only.

    An answer of a few numbers may be near zero by chance, and is mostly rounding errors then: it is held against the
    usual size of such answers.

    Attributes:
        precision: the evaluation's.
    """

    precision: Precision
    #: Of each output, for each answer: how far it is from the exact one, the size of that, and how many values it has.
    _seen: dict[int, list[tuple[float, float, int]]] = field(default_factory=dict[int, list[tuple[float, float, int]]])

    def add(self, look: Look) -> None:
        """Count an answer in."""
        for number, own in enumerate(look.outputs):
            if (apart := look.numbers.get(f"apart {number}")) is not None:
                one = apart, look.numbers[f"size {number}"], own.numel()
                self._seen.setdefault(number, []).append(one)

    @property
    def is_near(self) -> bool:
        """Whether all answers so far are near."""
        return all(self._are_near(seen) for seen in self._seen.values())

    @property
    def is_far(self) -> bool:
        """Whether an output is not, and its values are enough to tell that."""
        return any(
            sum(values for _, _, values in seen) >= _TELLING and not self._are_near(seen)
            for seen in self._seen.values()
        )

    def _are_near(self, seen: list[tuple[float, float, int]]) -> bool:
        share, close = _RELATED[self.precision], CLOSE[self.precision]
        usual = (sum(size * size for _, size, _ in seen) / len(seen)) ** 0.5
        return all(
            apart <= share * (size if values >= _TELLING else max(size, usual)) or apart <= close * values**0.5
            for apart, size, values in seen
        )


def look_at(looks: Sequence[Look]) -> None:
    """Find the numbers of many answers, and wait for the device once."""
    measured = [look.measure() for look in looks]
    every = [value.double() for found in measured for value in found.values()]
    numbers = iter(torch.stack(every).tolist() if every else [])
    for look, found in zip(looks, measured, strict=True):
        look.numbers = {name: next(numbers) for name in found}


def _is_steady(exact: torch.Tensor, nudged: torch.Tensor, precision: Precision) -> torch.Tensor:
    sizes = exact.abs()
    return ((nudged - exact).abs() <= _STEADY[precision] * (sizes + sizes.square().mean().sqrt())).all()


def warm_up(settings: Settings) -> None:
    """Look at a small answer as at a reference's.

    That loads the judge's own kernels, which takes milliseconds each, when they are used for the first time.
    """
    answer = torch.ones(_FEW, dtype=DTYPES[settings.precision], device="cuda")
    onepass.load(answer.dtype)  # behind an operation of torch, by which this thread has a CUDA context
    exact = [answer.double()]
    case = Case(seed=0, outputs=[answer], exact=exact)
    checksum(answer)
    look_at([Look([answer], exact, exact, [answer], varied=True, precision=settings.precision)])
    compare.check_values([answer.clone()], case, settings)
