"""Builder of an evaluation's evidence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kqueue.evidence import ErrorFigures, Evidence
from workers.judge.ending import EvaluationEnded

#: Fields of a model of :mod:`kqueue.evidence`, which validates them at the end.
Fields = dict[str, Any]


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
    build: Fields | None = None
    inputs: list[Fields] | None = None
    reference_draws: bool | None = None
    training_modules: list[str] | None = None
    parameters: str | None = None
    checks: int | None = None
    checks_asked: int | None = None
    tolerance: Fields | None = None
    tf32: bool | None = None
    reference_is_constant: bool | None = None
    constant_outputs: list[int] | None = None
    verified_calls: int | None = None
    setup_ms: float | None = None
    reference_setup_ms: float | None = None
    gradients: tuple[str, ...] | None = None
    untimed: str | None = None
    timed_variants: Fields | None = None
    baseline_taken: str | None = None
    floor: Fields | None = None
    provenance: Fields | None = None
    provenance_error: str | None = None
    sanitized: list[Fields] | None = None
    profile: Fields | None = None
    tests: Fields | None = None
    compiled_baseline: Fields | None = None
    baseline_drift: Fields | None = None
    canary: str | None = None
    leaked_bytes: int | None = None
    strangers: list[Fields] | str | None = None
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
