"""The ``evaluate`` function of OpenEvolve's searches."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kqueue.errors import EvaluationFailed, InvalidRequest
from kqueue.feedback import describe
from kqueue.integrations.common import Connection, Score, connect, request_for, scorer, take_from

# Imported by name, so that types can be checked without OpenEvolve.
_results: Any = importlib.import_module("openevolve.evaluation_result")

_connection: Final = Connection(connect)


def evaluator(problem: Path | str, *, score: Score = "speedup", **arguments: Any) -> Callable[[str], Any]:
    """Return OpenEvolve's ``evaluate`` for a problem.

    It raises if the fleet or the problem failed, and OpenEvolve tries again. The artifact ``feedback`` has the verdict.

    Args:
        problem: file of the reference.
        arguments: arguments of :func:`~kqueue.kernelbench.request_of`, such as ``backend`` and ``lane``.

    Raises:
        InvalidRequest: the file cannot be read.
    """
    of = scorer(score)
    try:
        reference = Path(problem).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"problem: {problem}: {error.strerror}: name the file of a reference") from None

    def evaluate(program_path: str) -> Any:
        taken = take_from(Path(program_path).read_text(encoding="utf-8"))
        request = request_for(reference, taken.kernel, **arguments)
        if isinstance(request, InvalidRequest):
            metrics = {"combined_score": 0.0, "correct": 0.0}
            return _results.EvaluationResult(metrics=metrics, artifacts={"feedback": f"FAILED: {request}"})
        verdict = _connection.client().submit(request).wait()
        number = of(verdict)
        if number is None:
            raise EvaluationFailed(verdict)
        metrics = {"combined_score": number, "correct": float(verdict.passed)}
        times = {"speedup": verdict.speedup, "runtime_ms": verdict.runtime_ms}
        metrics |= {name: value for name, value in times.items() if value is not None}
        return _results.EvaluationResult(metrics=metrics, artifacts={"feedback": describe(verdict, taken.kernel)})

    return evaluate
