"""What every run does with its kernels' evaluations, whatever chose the kernels."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, Final

from sqlalchemy import Engine

from kqueue.contract import Request, Verdict
from kqueue.errors import EvaluationFailed, InvalidRequest
from kqueue.search.plan import Task
from kqueue.states import SearchState
from kqueue.store import searches
from kqueue.store.searches import Run

#: Evaluations of a right kernel whose scores stay unknown.
_TRIES: Final = 3


@contextmanager
def recorded(engine: Engine, run: Run, plan: Task) -> Generator[None]:
    """Have a run alone, and record its plan and whether it came to its end.

    Raises:
        InvalidRequest: another process runs it, or did so since ``run`` was read.
    """
    with searches.alone(engine, run.id):
        now = searches.find(engine, str(run.id))
        if now.id != run.id or now.plan != run.plan:
            raise InvalidRequest(f"the plan of the search {run.name} changed just now: look at it, and resume it again")
        searches.set_state(engine, run.id, SearchState.RUNNING, plan.model_dump(mode="json"))
        try:
            yield
        except BaseException:
            searches.set_state(engine, run.id, SearchState.STOPPED)
            raise
        searches.set_state(engine, run.id, SearchState.DONE)


def asked(request: Request, run: Run, name: str, attempt: int, *, fresh: bool = False) -> Request:
    """Return a run's request under a key that follows from ``name``, which a kernel has one of in its run.

    An equal evaluation's verdict will do, but not if it is to be a ``fresh`` one or had no time.
    """
    key = f"search/{run.id}/{name}/{attempt}"
    fields = {"idempotency_key": key, "batch": run.name, "reuse": not fresh and attempt == 0}
    return request.model_copy(update=fields)


def is_to_be_asked_again(verdict: Verdict, scores: Mapping[str, float] | None, *, created: bool, attempt: int) -> bool:
    """Return True if a kernel is judged once more.

    Args:
        verdict: the verdict.
        scores: what it is worth, None if that is unknown.
        created: False if the evaluation is of an earlier submission.
        attempt: how often it was asked before.
    """
    # A right kernel may have no time because the machine was busy.
    again = verdict.passed and attempt + 1 < _TRIES
    # So it is with an earlier evaluation that gave no result: the next one has another key.
    return scores is None and (again or not created)


def without_score(verdict: Verdict, what: str, metrics: Iterable[str]) -> EvaluationFailed:
    """Return the error that ends a run as it does not know what one kernel of it is worth; ``what`` is that kernel."""
    error = EvaluationFailed(verdict)
    if verdict.judged:
        said = f"--metric {', '.join(metrics)}: unknown for {what}, which ended as {verdict.category}; choose another"
        error.args = (f"{said} metric or lane, or go on when the machine is less busy",)
    return error


def columns(verdict: Verdict) -> dict[str, Any]:
    """Return the columns of a proposal that its verdict has."""
    return {
        "category": str(verdict.category),
        "message": verdict.message,
        "runtime_ms": verdict.runtime_ms,
        "speedup": verdict.speedup,
    }
