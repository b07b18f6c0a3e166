"""The ``evaluate`` function of OpenEvolve's searches."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kqueue.errors import InvalidRequest
from kqueue.integrations.common import SHARED, Score, judge, scorer

# Imported by name, so that types can be checked without OpenEvolve.
_results: Any = importlib.import_module("openevolve.evaluation_result")


def evaluator(problem: Path | str, *, score: Score = "speedup", **arguments: Any) -> Callable[[str], Any]:
    """Return OpenEvolve's ``evaluate`` for a problem's file, with arguments of :func:`~kqueue.kernelbench.request_of`.

    It raises if the fleet or the problem failed, and OpenEvolve tries again. The artifact ``feedback`` has the verdict.
    """
    scorer(score)  # A wrong name is reported now.
    try:
        reference = Path(problem).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"problem: {problem}: {error.strerror}: name the file of a reference") from None

    def evaluate(program_path: str) -> Any:
        program = Path(program_path).read_text(encoding="utf-8")
        number, verdict, feedback, _ = judge(
            SHARED.client().evaluate, reference, program, score, **{"purpose": "rank"} | arguments
        )
        metrics = {"combined_score": number, "correct": float(verdict is not None and verdict.passed)}
        times = {} if verdict is None else {"speedup": verdict.speedup, "runtime_ms": verdict.runtime_ms}
        metrics |= {name: value for name, value in times.items() if value is not None}
        return _results.EvaluationResult(metrics=metrics, artifacts={"feedback": feedback})

    return evaluate
