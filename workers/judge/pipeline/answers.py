"""Checks of a reference's answers: whether they agree with float64 answers, and whether they are reliable."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from kqueue.contract import Precision, Settings
from workers.judge.channel.bits import checksum, extremes
from workers.judge.gpu import onepass
from workers.judge.pipeline import compare
from workers.judge.pipeline.cases import CLOSE, DTYPES, Case, differ, distance, numbers, pieces, size

#: Maximum relative distance between the reference and its float64 version, for float64 answers to be usable, and for a
#: variant to count.
_RELATED: Final = {Precision.FP32: 1e-2, Precision.FP16: 0.25, Precision.BF16: 0.25}
_PRECISE: Final = {Precision.FP32: 1e-3, Precision.FP16: 3e-2, Precision.BF16: 3e-2}
#: Maximum relative change of each value of its answer when the inputs change by less than a rounding error. A right
#: kernel rounds more than once, so this is a fraction of a kernel's tolerance.
_STEADY: Final = {precision: close / 3 for precision, close in CLOSE.items()}
#: Minimum number of values to decide whether the float64 model is the same. Fewer can all be near zero by chance.
_TELLING: Final = 64
#: Number of values of the answer that is inspected in the warm-up to load kernels.
_FEW: Final = 1 << 12


@dataclass(slots=True)
class Look:
    """Numbers about one answer. :func:`look_at` computes the numbers of many and waits for the device once.

    Attributes:
        outputs: the answer.
        exact: the float64 answer, or None if there is none or it does not matter.
        nudged: the float64 answer to inputs changed by less than a rounding error, or None. Without a float64 answer,
            the reference's own answer to inputs changed by about a rounding error.
        varied: whether the inputs are unlike the problem's own.
        precision: the evaluation's precision.
        steady: multiple of the usual bound by which the answer can change with the nudged inputs.
        infinite: numbers of the outputs that are infinite somewhere for the problem's own inputs, as under a mask.
        numbers: the numbers by name.
    """

    outputs: Sequence[torch.Tensor]
    exact: Sequence[torch.Tensor] | None
    nudged: Sequence[torch.Tensor] | None
    varied: bool
    precision: Precision
    steady: float = 1.0
    infinite: Collection[int] = ()
    numbers: dict[str, float] = field(default_factory=dict[str, float])

    def measure(self) -> dict[str, torch.Tensor]:
        """Return the checks of an answer as tensors on the device, by name, without waiting for the device."""
        values: dict[str, torch.Tensor] = {}
        for number, own in enumerate(self.outputs):
            truth = own if self.exact is None else self.exact[number]
            nudged = own if self.nudged is None else numbers(self.nudged[number])
            own, truth = numbers(own), numbers(truth)
            if not (own.is_floating_point() or own.is_complex()):
                if self.varied and self.exact is not None:
                    values[f"apart {number}"] = differ(own, truth).any()
                    values[f"size {number}"] = torch.zeros((), device=own.device)
                if self.nudged is not None:
                    values[f"moves {number}"] = differ(truth, nudged).any()
                continue
            if own.numel():
                low, high = extremes(own)
                if own.is_floating_point():
                    values[f"nan {number}"] = low.isnan()
                if number in self.infinite:
                    pairs = zip(pieces(own), pieces(truth), strict=True)
                    ends = [extremes(o.where(o.isfinite() | (o != t), 0.0)) for o, t in pairs]
                    low, high = extremes(torch.stack([end for both in ends for end in both]))
                if self.varied:
                    values[f"wild {number}"] = torch.maximum(-low, high) >= torch.finfo(own.dtype).max / 64
            if self.exact is not None:
                values[f"apart {number}"] = distance(own, truth)
                values[f"size {number}"] = size(truth)
            if self.nudged is not None and own.numel():
                values[f"moves {number}"] = ~_is_steady(truth, nudged, self.steady * _STEADY[self.precision])
        return values

    @property
    def has_nan(self) -> bool:
        """True if there is a NaN."""
        return self._any("nan")

    @property
    def is_tame(self) -> bool:
        """True if all values of an answer to varied inputs are far from overflowing."""
        return not self._any("nan") and not self._any("wild")

    @property
    def is_precise(self) -> bool:
        """True if an answer to varied inputs is near the float64 answer, and far from overflowing."""
        share = _PRECISE[self.precision]
        return self.is_tame and all(
            # Indices must be equal: otherwise equal values make them ambiguous.
            (apart := self.numbers.get(f"apart {number}")) is not None
            and apart <= share * self.numbers[f"size {number}"]
            for number in range(len(self.outputs))
        )

    @property
    def is_steady(self) -> bool:
        """True if inputs that differ by less than a rounding error have the same answer. False at steps."""
        return self.nudged is not None and not self._any("moves")

    def _any(self, prefix: str) -> bool:
        return any(value for name, value in self.numbers.items() if name.startswith(prefix))


@dataclass(slots=True)
class Relation:
    """Decides whether a problem's answers are a less precise form of the float64 answers.

    An answer of few values can be near zero by chance and then consists of rounding errors. It is compared with the
    usual size of such answers.
    """

    precision: Precision
    #: For each output and answer: distance from the float64 answer, size of that answer, and number of values.
    _seen: dict[int, list[tuple[float, float, int]]] = field(default_factory=dict[int, list[tuple[float, float, int]]])

    def add(self, look: Look) -> None:
        """Count an answer."""
        for number, own in enumerate(look.outputs):
            if (apart := look.numbers.get(f"apart {number}")) is not None:
                self._seen.setdefault(number, []).append((apart, look.numbers[f"size {number}"], own.numel()))

    @property
    def is_near(self) -> bool:
        """True if all answers so far are near."""
        return all(self._are_near(seen) for seen in self._seen.values())

    @property
    def is_far(self) -> bool:
        """True if an output is not near and has enough values to decide that."""
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
    """Compute the numbers of many answers, and wait for the device once."""
    measured = [look.measure() for look in looks]
    every = [value.double() for found in measured for value in found.values()]
    numbers = iter(torch.stack(every).tolist() if every else [])
    for look, found in zip(looks, measured, strict=True):
        look.numbers = {name: next(numbers) for name in found}


def _is_steady(exact: torch.Tensor, nudged: torch.Tensor, share: float) -> torch.Tensor:
    usual = size(exact) / exact.numel() ** 0.5
    steady: list[torch.Tensor] = []
    for was, now in zip(pieces(exact), pieces(nudged), strict=True):
        if was.itemsize == 1:  # torch has few operations for 8-bit floats.
            was, now = was.float(), now.float()
        steady.append(((now == was) | ((now - was).abs() <= share * (was.abs() + usual))).all())  # ∞ - ∞ is NaN.
    return torch.stack(steady).all()


def warm_up(settings: Settings) -> None:
    """Inspect a small answer like a reference's, to load the judge's own kernels.

    Each of them takes milliseconds at its first use.
    """
    answer = torch.ones(_FEW, dtype=DTYPES[settings.precision], device="cuda")
    onepass.load(answer.dtype)  # After an operation of torch, which gives this thread a CUDA context.
    exact = [answer.double()]
    case = Case(seed=0, outputs=[answer], exact=exact)
    checksum(answer)
    look_at([Look([answer], exact, exact, varied=True, precision=settings.precision)])
    compare.check_values([answer.clone()], case, settings)
