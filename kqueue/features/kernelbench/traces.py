"""Verdicts as flashinfer-bench's traces: one for each workload that was judged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from kqueue.categories import Blame, Category
from kqueue.contract import Outcome
from kqueue.errors import InvalidRequest
from kqueue.evidence import Environment, ShapeResult
from kqueue.formats import one, origin

#: Their status for our categories. All other failures of a kernel are runtime errors.
_STATUS: Final = {
    Category.PASSED: "PASSED",
    **dict.fromkeys((Category.WRONG_SHAPE, Category.WRONG_OUTPUT_STRUCTURE), "INCORRECT_SHAPE"),
    Category.WRONG_DTYPE: "INCORRECT_DTYPE",
    **dict.fromkeys((Category.WRONG_VALUES, Category.NOT_FINITE, Category.NONDETERMINISTIC), "INCORRECT_NUMERICAL"),
    **dict.fromkeys((Category.COMPILE_ERROR, Category.SYNTAX_ERROR, Category.IMPORT_ERROR), "COMPILE_ERROR"),
    **dict.fromkeys((Category.TIMEOUT, Category.COMPILE_TIMEOUT), "TIMEOUT"),
}


def traces_of(folder: Path, record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the traces of a line of ``kqueue judge --json`` about a definition of a set."""
    known = {name: value for name, value in record["verdict"].items() if name in Outcome.model_fields}
    outcome = Outcome.model_validate(known)
    environment = Environment.model_validate(record["verdict"]["environment"])
    name, solution = str(record["problem_label"]), str(record["kernel_label"])
    if outcome.blame not in (Blame.NONE, Blame.CANDIDATE):
        raise InvalidRequest(f"{solution}: {outcome.category} says nothing about the kernel, so it is no trace")
    problem = one(folder, name)
    names = [shape.name for shape in problem.shapes]
    workloads = dict(zip(names, origin(problem.source)["workloads"], strict=True))
    rows = outcome.evidence.shapes.rows if outcome.evidence.shapes else ()
    for row in rows or [ShapeResult(name=names[0], held_out=False, weight=1.0, category=outcome.category)]:
        if row.category is not None:
            evaluation = _evaluation(outcome, row, environment)
            yield {"definition": name, "workload": workloads[row.name], "solution": solution, "evaluation": evaluation}


def _evaluation(outcome: Outcome, row: ShapeResult, environment: Environment) -> dict[str, Any]:
    assert row.category is not None
    status = _STATUS.get(row.category, "RUNTIME_ERROR")
    errors = outcome.evidence.comparison if row.category is Category.PASSED else outcome.facts.errors
    correctness = performance = None
    if status in ("PASSED", "INCORRECT_NUMERICAL"):
        found = {kind: getattr(errors, f"max_{kind[:3]}_error", None) for kind in ("relative", "absolute")}
        correctness = {f"max_{kind}_error": value or 0.0 for kind, value in found.items()}
    if status == "PASSED":
        if row.runtime_ms is None or row.baseline_ms is None:
            raise InvalidRequest("a trace of a kernel that passed needs times: judge it without --no-timing")
        performance = {
            "latency_ms": row.runtime_ms,
            "reference_latency_ms": row.baseline_ms,
            "speedup_factor": row.baseline_ms / row.runtime_ms,
        }
    libs = {name: getattr(environment, name) for name in ("cuda", "torch", "triton", "kqueue")}
    return {
        "status": status,
        "environment": {"hardware": environment.device, "libs": {name: text for name, text in libs.items() if text}},
        "timestamp": datetime.now(UTC).isoformat(),
        "log": outcome.log or outcome.message or "",
        "correctness": correctness,
        "performance": performance,
    }
