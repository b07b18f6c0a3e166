"""The outcome of a kernel over all shapes of a problem.

Of a shape that is held out only the result is shown: its category, its times and the number of its checks. Its message,
facts and log could show its sizes, and a kernel could write them there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kqueue.contract import Outcome, Phase
from kqueue.evidence import BaselineError, Evidence, Facts, Measurement, Provenance, ShapeResult, ShapeResults
from kqueue.shapes import Shape
from workers.judge.pipeline import estimator
from workers.judge.pipeline.evidence import merge_errors
from workers.judge.pipeline.passes import LATEST

#: Phases whose failures do not depend on the shape, if they happen at the first one.
_BEFORE_SHAPES: Final = frozenset({Phase.PREPARE, Phase.LOAD, Phase.COMPILE})
#: Fields of a measurement that are averaged over shapes.
_TIMES: Final = ("median_ms", "q1_ms", "q3_ms", "mean_ms", "std_ms", "min_ms", "max_ms")
#: Fields of the evidence that are added over shapes.
_ADDED: Final = ("checks", "checks_asked", "verified_calls")


@dataclass(frozen=True, slots=True)
class Judged:
    """The outcome for one shape, and the time in seconds that it took."""

    shape: Shape
    outcome: Outcome
    seconds: float


def combine(shapes: Sequence[Shape], results: Sequence[Judged], *, on_gpu: bool) -> Outcome:
    """Return the outcome over all shapes. Only the last result can be a failure."""
    mean = functools.partial(_mean, weights=[result.shape.weight for result in results], on_gpu=on_gpu)
    first, last = results[0], results[-1]
    if not last.outcome.passed and last is first and last.outcome.phase in _BEFORE_SHAPES:
        return last.outcome
    shown = first if last.outcome.passed or last.shape.held_out else last
    evidence = _evidence(shapes, results, shown.outcome.evidence)
    if not last.outcome.passed:
        return _failure(last, shown.outcome.log, evidence)
    # One shape's speed-of-light bound says nothing about the mean time of all.
    evidence = evidence.model_copy(update={"compiled_baseline": _compiled(results, mean), "floor": None})
    update: dict[str, Any] = {
        "runtime": mean([result.outcome.runtime for result in results]),
        "baseline": mean([result.outcome.baseline for result in results]),
        "evidence": evidence,
        "message": _message(shapes, evidence),
    }
    if any(result.outcome.speedup is None for result in results):
        update["baseline"] = None  # The mean of the other shapes would not be the kernel's speedup.
    return first.outcome.model_copy(update=update)


def _message(shapes: Sequence[Shape], evidence: Evidence) -> str:
    hidden = (evidence.checks or 0) - (evidence.checks_asked or 0)
    held_out = sum(shape.held_out for shape in shapes)
    return (
        f"right on {evidence.checks} input sets of {len(shapes)} shapes ({held_out} held out), {hidden} of the sets "
        f"hidden variants, random each time{evidence.doubts}"
    )


def _failure(last: Judged, log: str, evidence: Evidence) -> Outcome:
    outcome, name = last.outcome, last.shape.name
    if last.shape.held_out:
        return Outcome(
            category=outcome.category,
            message=f"shape {name}: {outcome.category}. Nothing else is shown of a shape that is held out",
            phase=outcome.phase,
            facts=Facts(shape=name, withheld=True, instead_of=outcome.facts.instead_of),
            log=log,
            evidence=evidence,
        )
    facts = outcome.facts.model_copy(update={"shape": name})
    message = f"shape {name}: {outcome.message}"
    return outcome.model_copy(update={"message": message, "facts": facts, "evidence": evidence})


def _evidence(shapes: Sequence[Shape], results: Sequence[Judged], shown: Evidence) -> Evidence:
    """Return the evidence of one shape with the results of all."""
    everything = [result.outcome.evidence for result in results]
    update: dict[str, Any] = {name: getattr(everything[-1], name) for name in LATEST}
    for name in _ADDED:
        counts = [count for one in everything if (count := getattr(one, name)) is not None]
        update[name] = sum(counts) if counts else None
    # A kernel can write numbers into its errors, and texts into the names of its GPU kernels.
    public = [result.outcome.evidence for result in results if not result.shape.held_out]
    update["comparison"] = merge_errors([one.comparison for one in public if one.comparison is not None])
    update["provenance"] = _provenance(results, public)
    update["shapes"], update["judge_speedup"] = _results(shapes, results), None
    passes = [
        row.model_copy(update={"name": f"{result.shape.name}: {row.name}"})
        for result in results
        for row in result.outcome.evidence.passes or ()
    ]
    update["passes"] = tuple(passes) or None
    return shown.model_copy(update=update)


def _provenance(results: Sequence[Judged], public: Sequence[Evidence]) -> Provenance | None:
    """Return the provenance for the shape for which the kernel did least itself, because it can be a decoy there only.

    If that shape is held out, only the fact is reported.
    """
    known = [one.provenance for one in public if one.provenance is not None]
    least = min(known, key=lambda origin: origin.own_share, default=None)
    for result in results:
        origin = result.outcome.evidence.provenance
        if least is not None and not least.decoy and origin is not None and origin.decoy:
            return least.model_copy(update={"decoy": True, "why": f"the kernel is a decoy for {result.shape.name}"})
    return least


def _compiled(
    results: Sequence[Judged], mean: Callable[[list[Measurement | None]], Measurement | None]
) -> Measurement | BaselineError | None:
    """Return the mean time of the reference under ``torch.compile``, or the first error."""
    times: list[Measurement | None] = []
    for result in results:
        taken = result.outcome.evidence.compiled_baseline
        if isinstance(taken, BaselineError):
            return BaselineError(error=f"it failed for {result.shape.name}") if result.shape.held_out else taken
        times.append(taken)
    return mean(times)


def _results(shapes: Sequence[Shape], results: Sequence[Judged]) -> ShapeResults:
    rows = [_row(result) for result in results]
    rows += [ShapeResult(**_identity(shape)) for shape in shapes[len(results) :]]
    speedups = {row.name: row.speedup for row in rows if row.speedup is not None}
    if not speedups or len(results) < len(shapes) or not results[-1].outcome.passed:
        return ShapeResults(rows=tuple(rows))
    worst = min(speedups, key=lambda name: speedups[name])
    spread = max(speedups.values()) / speedups[worst]
    return ShapeResults(rows=tuple(rows), worst=worst, worst_speedup=speedups[worst], spread=spread)


def _identity(shape: Shape) -> dict[str, Any]:
    return {"name": shape.name, "held_out": shape.held_out, "weight": shape.weight}


def _row(result: Judged) -> ShapeResult:
    outcome, evidence = result.outcome, result.outcome.evidence
    return ShapeResult(
        **_identity(result.shape),
        category=outcome.category,
        runtime_ms=outcome.runtime_ms,
        baseline_ms=outcome.baseline_ms,
        speedup=outcome.speedup,
        speedup_interval=outcome.speedup_interval,
        timing_basis=outcome.timing_basis,
        checks=evidence.checks,
        hidden_variants=None if evidence.checks is None else evidence.checks - (evidence.checks_asked or 0),
        seconds=round(result.seconds, 3),
        runtime_samples_ms=outcome.runtime and outcome.runtime.samples_ms,
        baseline_samples_ms=outcome.baseline and outcome.baseline.samples_ms,
    )


def _mean(times: Sequence[Measurement | None], weights: Sequence[float], *, on_gpu: bool) -> Measurement | None:
    """Return the weighted geometric mean of the shapes' times, or None if one is missing."""
    known = [one for one in times if one is not None]
    if len(known) < len(times):
        return None
    weighted = [(weight / sum(weights), one) for weight, one in zip(weights, known, strict=True)]
    # No time is below zero.
    mean: dict[str, Any] = {name: math.prod(getattr(one, name) ** share for share, one in weighted) for name in _TIMES}
    errors = [
        (share * one.error, share * min(one.error, estimator.common_error(one, on_gpu=on_gpu)))
        for share, one in weighted
        if one.error is not None
    ]
    # The shapes' calls are independent, so their errors add up in squares. The processes are the same.
    own = [math.sqrt(max(0.0, whole * whole - common * common)) for whole, common in errors]
    error = math.hypot(*own, sum(common for _, common in errors)) if len(errors) == len(known) else None
    cpu = any(one.basis == "cpu_clock" for one in known)
    return Measurement(
        basis="cpu_clock" if cpu else "gpu_clock",
        purpose=known[0].purpose,
        count=sum(one.count for one in known),
        discarded=sum(one.discarded for one in known),
        low_ms=None if error is None else max(0.0, mean["median_ms"] * (1 - error)),
        high_ms=None if error is None else mean["median_ms"] * (1 + error),
        overhead_ms=sum(share * one.overhead_ms for share, one in weighted),
        is_fine=all(one.is_fine for one in known),
        cold_l2=all(one.cold_l2 for one in known),
        clocks=known[-1].clocks,
        **mean,
    )
