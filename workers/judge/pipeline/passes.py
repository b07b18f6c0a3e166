"""The outcome of a kernel over both passes of an evaluation with gradients, and the means of several shapes' passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from kqueue.contract import Outcome
from kqueue.evidence import Measurement, PassResult
from workers.judge.pipeline.evidence import Fields

#: Fields of the evidence about the device or the processes, which the last judgement has.
LATEST: Final = ("cpu_s", "canary", "leaked_bytes", "cleanup")
#: Share of both passes together and of forward alone in the time of each pass.
_TERMS: Final = {"forward": (0, 1), "backward": (1, -1), "both": (1, 0)}


def combine(both: Outcome, forward: Outcome) -> Outcome:
    """Return the outcome over both passes. The first one has passed. The other one is the kernel's forward alone."""
    if not forward.passed:
        message = f"right with its gradients, and then in forward alone: {forward.message}"
        return forward.model_copy(update={"message": message})
    update: Fields = {name: getattr(forward.evidence, name) for name in LATEST}
    if both.runtime and both.baseline and forward.runtime and forward.baseline:
        kernel, reference = (both.runtime, forward.runtime), (both.baseline, forward.baseline)
        is_clear = len({one.basis for one in (*kernel, *reference)}) == 1
        update["passes"] = tuple(
            _result(name, _time(kernel, terms), _time(reference, terms), is_clear=is_clear)
            for name, terms in _TERMS.items()
        )
    return both.model_copy(update={"evidence": both.evidence.model_copy(update=update)})


def _time(measured: Sequence[Measurement], terms: Sequence[int]) -> tuple[float, float | None]:
    """Return a sum or difference of times in milliseconds, and its relative error if it is known."""
    ms = sum(term * one.median_ms for term, one in zip(terms, measured, strict=True))
    errors = [(one.error, one.median_ms) for term, one in zip(terms, measured, strict=True) if term]
    # Absolute errors of independent times add up in squares.
    known = [error * median_ms for error, median_ms in errors if error is not None]
    return ms, math.hypot(*known) / ms if ms > 0 and len(known) == len(errors) else None


def _result(
    name: str, kernel: tuple[float, float | None], reference: tuple[float, float | None], *, is_clear: bool
) -> PassResult:
    """Return the row of a pass, given times with their relative errors. ``is_clear`` is False for several clocks."""
    (runtime_ms, error), (baseline_ms, other) = kernel, reference
    row: Fields = {"name": name, "runtime_ms": runtime_ms, "baseline_ms": baseline_ms}
    if is_clear and min(runtime_ms, baseline_ms) > 0:
        row["speedup"] = speedup = baseline_ms / runtime_ms
        if error is not None and other is not None:
            factor = 1 + math.hypot(error, other)
            row["speedup_interval"] = speedup / factor, speedup * factor
    return PassResult.model_validate(row)


def mean(shapes: Sequence[Sequence[PassResult]], weights: Sequence[float]) -> tuple[PassResult, ...] | None:
    """Return the weighted geometric means of the passes of all shapes, or None if a shape has no times."""
    if not shapes or not all(shapes):
        return None
    shares = [weight / sum(weights) for weight in weights]
    rows: list[PassResult] = []
    for each in zip(*shapes, strict=True):
        errors = [
            share * (row.speedup_interval[1] / row.speedup - 1)
            for share, row in zip(shares, each, strict=True)
            if row.speedup and row.speedup_interval
        ]
        runtime_ms, baseline_ms = (
            geometric([getattr(row, name) for row in each], shares) for name in ("runtime_ms", "baseline_ms")
        )
        error = math.hypot(*errors) if len(errors) == len(each) else None
        is_clear = all(row.speedup is not None for row in each)
        rows.append(_result(each[0].name, (runtime_ms, error), (baseline_ms, 0.0), is_clear=is_clear))
    return tuple(rows)


def geometric(values: Sequence[float], shares: Sequence[float]) -> float:
    """Return the weighted geometric mean, or 0 if a time is below the launch overhead."""
    if min(values) <= 0:
        return 0.0
    return math.exp(sum(share * math.log(value) for share, value in zip(shares, values, strict=True)))
