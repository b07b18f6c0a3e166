"""The outcome of a kernel over both passes of an evaluation with gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from kqueue.contract import Outcome
from kqueue.evidence import Measurement, PassResult, speedup_interval

#: Fields of the evidence about the device or the processes, which the last judgement has.
LATEST: Final = ("cpu_s", "self_test", "leaked_bytes", "cleanup")
#: Share of both passes together and of forward alone in the time of each pass.
_TERMS: Final = {"forward": (0, 1), "backward": (1, -1), "both": (1, 0)}


def combine(both: Outcome, forward: Outcome) -> Outcome:
    """Return the outcome over both passes. The first one has passed. The other one is the kernel's forward alone."""
    if not forward.passed:
        message = f"right with its gradients, and then in forward alone: {forward.message}"
        return forward.model_copy(update={"message": message})
    update: dict[str, Any] = {name: getattr(forward.evidence, name) for name in LATEST}
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
    # Absolute errors of independent times add up in squares. The error of one time alone stays as it is.
    known = [error * (median_ms / ms) for error, median_ms in errors if error is not None and ms > 0]
    return ms, math.hypot(*known) if len(known) == len(errors) else None


def _result(
    name: str, kernel: tuple[float, float | None], reference: tuple[float, float | None], *, is_clear: bool
) -> PassResult:
    """Return the row of a pass, given times with their relative errors. ``is_clear`` is False for several clocks."""
    (runtime_ms, error), (baseline_ms, other) = kernel, reference
    speedup = baseline_ms / runtime_ms if is_clear and min(runtime_ms, baseline_ms) > 0 else None
    return PassResult(
        name=name,
        runtime_ms=runtime_ms if runtime_ms > 0 else None,
        baseline_ms=baseline_ms if baseline_ms > 0 else None,
        speedup=speedup,
        speedup_interval=None if speedup is None else speedup_interval(speedup, error, other),
    )
