"""The evidence of an evaluation, while its stages observe it, and its parts that comparisons make."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch

from kqueue.evidence import ErrorFigures, Evidence, ProfileResult, WrongMap

#: Maximum number of rows and columns of the map of wrong values.
_CELLS: Final = 16
#: Number of values of that map to compare at a time, to bound memory.
_CHUNK: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures from one pass over an output. Sums and norms are in float64, over finite values."""

    #: Numbers of values: not finite where the reference is, beyond the tolerance, beyond KernelBench's tolerance, and
    #: farther off, relative to their own size, than twice ``Grade.farthest``.
    strays: float
    wrong: float
    unlike: float
    far_off: float
    #: Number and sum of the reference's finite values, then sums of squares: output minus reference, reference, output
    #: minus exact, reference minus exact, exact.
    finite: float
    total: float
    distance2: float
    size2: float
    astray2: float
    own2: float
    truth2: float
    max_abs: float
    max_rel: float

    @property
    def distance(self) -> float:
        return self.distance2**0.5

    @property
    def size(self) -> float:
        return self.size2**0.5

    @property
    def spread(self) -> float:
        """Norm of the reference's values minus their mean."""
        # A power would raise OverflowError where this product gives infinity.
        around = self.size2 - self.total * self.total / max(self.finite, 1.0)
        return around**0.5 if around > 1e-13 * self.size2 else 0.0


class Observed(Evidence, frozen=False):
    """The evidence so far, which the stages fill."""


class Compared(NamedTuple):
    """The errors of a compared call, and its fault by each profile, which is empty if there is none."""

    errors: ErrorFigures
    faults: dict[str, str]


@dataclass(slots=True)
class Comparisons:
    """The worst errors of all compared calls, and the first fault by each profile.

    Attributes:
        is_complete: True if all of the problem's own inputs were compared, or no profile could still pass.
    """

    errors: ErrorFigures | None = None
    faults: dict[str, str] = field(default_factory=dict[str, str])
    is_complete: bool = False

    def add(self, errors: ErrorFigures | None, faults: dict[str, str]) -> None:
        """Add a call."""
        self.errors = merge_errors([each for each in (self.errors, errors) if each is not None])
        self.faults |= {name: self.faults.get(name) or fault for name, fault in faults.items()}

    def results(self, profiles: Sequence[str]) -> tuple[ProfileResult, ...] | None:
        """Return the results of these profiles, or None if there are none."""
        return tuple(self._result(name, self.faults.get(name)) for name in profiles) or None

    def _result(self, name: str, fault: str | None) -> ProfileResult:
        if fault is None or not (fault or self.is_complete):
            return ProfileResult(name=name, passed=None, why="not all answers that it needs were compared")
        return ProfileResult(name=name, passed=not fault, why=fault)


def merge_errors(figures: Sequence[ErrorFigures]) -> ErrorFigures | None:
    """Combine the figures of several calls: the worst of each, ignoring None. Return None for none."""
    merged: dict[str, Any] = {}
    for name, value in itertools.chain.from_iterable(figures):
        worst = merged.get(name)
        if worst is None or value is None:
            merged[name] = value if worst is None else worst
        elif isinstance(value, bool):
            merged[name] = (worst and value) if name.endswith("_correct") else (worst or value)
        else:
            merged[name] = max(worst, value)
    return ErrorFigures(**merged) if merged else None


def wrong_map(
    out: torch.Tensor, ref: torch.Tensor, rows: int, where: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> WrongMap | None:
    """Return the map of an output's wrong values, or None if the device has no memory for it.

    Args:
        out, ref: an output and the reference's, in one dimension.
        rows: number of rows, which are the product of all dimensions but the last.
        where: function that returns where values are wrong.
    """
    columns = ref.numel() // rows
    down, across = _cells(rows), _cells(columns)
    # Whole rows at a time, or parts of a long row.
    height, width = max(1, _CHUNK // columns), min(columns, _CHUNK)
    try:
        counts = torch.zeros(len(down), len(across), dtype=torch.int64, device=ref.device)
        for top, left in itertools.product(range(0, rows, height), range(0, columns, width)):
            tall, wide = min(height, rows - top), min(width, columns - left)
            part = slice(top * columns + left, top * columns + left + tall * wide)
            mask = where(out[part], ref[part]).view(tall, wide)
            for i, y in _overlaps(down, top, tall):
                line = mask[y].sum(0)
                for j, x in _overlaps(across, left, wide):
                    counts[i, j] += line[x].sum()
        wrong: list[list[int]] = counts.tolist()
    except RuntimeError:  # Other processes used the memory. The verdict does not need the map.
        return None
    shares = ["".join(_digit(wrong[i][j], len(y) * len(x)) for j, x in enumerate(across)) for i, y in enumerate(down)]
    return WrongMap(rows=rows, columns=columns, shares=tuple(shares))


def _cells(size: int) -> list[range]:
    """Divide positions into cells of equal size, as far as possible."""
    number = min(_CELLS, size)
    return [range(cell * size // number, (cell + 1) * size // number) for cell in range(number)]


def _overlaps(cells: Sequence[range], begin: int, size: int) -> Iterator[tuple[int, slice]]:
    """Yield the cells that overlap ``size`` positions from ``begin`` on, each with the positions inside it."""
    for number, cell in enumerate(cells):
        first, last = max(cell.start, begin), min(cell.stop, begin + size)
        if first < last:
            yield number, slice(first - begin, last - begin)


def _digit(wrong: int, of: int) -> str:
    """Return the digit of a share in a :class:`kqueue.evidence.WrongMap`."""
    return "0" if not wrong else "9" if wrong == of else str(1 + 8 * wrong // of)
