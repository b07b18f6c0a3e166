"""Builder of an evaluation's evidence."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from kqueue.evidence import ErrorFigures, Evidence
from workers.judge.ending import EvaluationEnded

#: Fields of a model of :mod:`kqueue.evidence`, which validates them at the end.
Fields = dict[str, Any]
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


@dataclass(slots=True)
class EvidenceBuilder:
    """Evidence that the stages fill. See :class:`kqueue.evidence.Evidence` for the fields.

    Attributes:
        errors: error figures of all compared calls.
        asked: the profiles to report.
        is_compared: True if all of the problem's own inputs were compared, or no profile could still pass.
        tests_log: end of the captured output of a repository's tests.
    """

    asked: tuple[str, ...] = ()
    is_compared: bool = False
    errors: list[Fields] = field(default_factory=list[Fields])
    tests_log: str = ""
    findings: list[Fields] | None = None
    program: str | None = None
    build: Fields | None = None
    inputs: list[Fields] | None = None
    reference_draws: bool | None = None
    training_modules: list[str] | None = None
    parameters: str | None = None
    checks: int | None = None
    checks_asked: int | None = None
    tolerance: Fields | None = None
    tolerances: list[Fields | None] | None = None
    checker: Fields | None = None
    calls: int | None = None
    tf32: bool | None = None
    reference_is_constant: bool | None = None
    constant_outputs: list[int] | None = None
    verified_calls: int | None = None
    setup_ms: float | None = None
    reference_setup_ms: float | None = None
    gradients: tuple[str, ...] | None = None
    unvaried: str | None = None
    untimed: str | None = None
    timed_variants: Fields | None = None
    baseline_taken: str | None = None
    judge_speedup: float | None = None
    floor: Fields | None = None
    provenance: Fields | None = None
    provenance_error: str | None = None
    sanitized: list[Fields] | None = None
    profile: Fields | None = None
    tests: Fields | None = None
    compiled_baseline: Fields | None = None
    baseline_drift: Fields | None = None
    self_test: str | None = None
    leaked_bytes: int | None = None
    foreign_processes: list[Fields] | str | None = None
    reference: Fields | None = None
    gpu_memory: Fields | None = None
    isolation: Fields | None = None
    slots_on_device: int | None = None
    waited_for: tuple[str, ...] | None = None
    durations_s: dict[str, float] | None = None
    begun_s: dict[str, float] | None = None
    cpu_s: dict[str, float] | None = None
    peak_bytes: int | None = None
    output_bytes: int | None = None
    cleanup: str | None = None

    def note(self, ended: EvaluationEnded) -> None:
        """Record the error figures of a wrong answer."""
        facts = ended.outcome.facts
        if facts.strict_correct is not None:
            figures = {name: getattr(facts, name) for name in ErrorFigures.model_fields}
            self.errors.append(figures | {"profiles": ended.profiles})

    def fields(self) -> Fields:
        """Return the evidence by the name of its field, without absent fields."""
        values = {name: getattr(self, name, None) for name in Evidence.model_fields}
        errors = merge_errors(self.errors)
        faults: dict[str, str] = errors.pop("profiles", {})
        values["comparison"] = errors or None
        values["profiles"] = [self._row(name, faults.get(name)) for name in self.asked] or None
        return {name: value for name, value in values.items() if value is not None}

    def _row(self, name: str, fault: str | None) -> Fields:
        """Return the fields of a :class:`kqueue.evidence.ProfileResult`, given the fault, if an answer was compared."""
        if fault is None or not (fault or self.is_compared):
            return {"name": name, "passed": None, "why": "not all answers that it needs were compared"}
        return {"name": name, "passed": not fault, "why": fault}


def merge_errors(figures: list[Fields]) -> Fields:
    """Combine the figures of several cases: the worst of each, ignoring None."""
    merged: Fields = {}
    for one in figures:
        for name, value in one.items():
            worst = merged.get(name)
            if worst is None or value is None:
                merged[name] = value if worst is None else worst
            elif isinstance(value, dict):
                merged[name] = worst | value | {profile: fault for profile, fault in worst.items() if fault}
            elif isinstance(value, bool):
                merged[name] = (worst and value) if name.endswith("_correct") else (worst or value)
            else:
                merged[name] = max(worst, value)
    return merged


def wrong_map(
    out: torch.Tensor, ref: torch.Tensor, rows: int, where: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> Fields | None:
    """Return the fields of a :class:`kqueue.evidence.WrongMap`, or None if the device has no memory for it.

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
    return {"rows": rows, "columns": columns, "shares": shares}


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
