"""Shared handling of evaluations for searches and tuning runs."""

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

#: Maximum number of evaluations of a correct kernel whose scores stay unknown.
_TRIES: Final = 3


@contextmanager
def recorded(engine: Engine, run: Run, plan: Task) -> Generator[None]:
    """Acquire exclusive use of a run during the block, and record its plan and its final state.

    Raises:
        InvalidRequest: another process runs it, or has run it since ``run`` was read.
    """
    with searches.alone(engine, run.id):
        now = searches.find(engine, str(run.id))
        if now.id != run.id or now.plan != run.plan:
            raise InvalidRequest(f"the plan of the search {run.name} has just changed: check it, and resume it again")
        searches.set_state(engine, run.id, SearchState.RUNNING, plan.model_dump(mode="json"))
        try:
            yield
        except BaseException:
            searches.set_state(engine, run.id, SearchState.STOPPED)
            raise
        searches.set_state(engine, run.id, SearchState.DONE)


def asked(request: Request, run: Run, name: str, attempt: int, *, fresh: bool = False) -> Request:
    """Return a run's request under a key that depends on ``name``, which is unique for each kernel in its run.

    The verdict of an equal evaluation is reused, except for ``fresh`` requests and after one without a time.
    """
    key = f"search/{run.id}/{name}/{attempt}"
    fields = {"idempotency_key": key, "batch": run.name, "reuse": not fresh and attempt == 0}
    return request.model_copy(update=fields)


def is_to_be_asked_again(verdict: Verdict, scores: Mapping[str, float] | None, *, created: bool, attempt: int) -> bool:
    """Return True if a kernel must be judged once more.

    Args:
        verdict: the verdict.
        scores: its scores, or None if they are unknown.
        created: False if the evaluation is of an earlier submission.
        attempt: number of earlier requests for it.
    """
    # A correct kernel can lack a time because the machine was busy.
    again = verdict.passed and attempt + 1 < _TRIES
    # An earlier evaluation can have no result. The next one has another key.
    return scores is None and (again or not created)


def without_score(verdict: Verdict, what: str, metrics: Iterable[str]) -> EvaluationFailed:
    """Return the error that ends a run because the kernel ``what`` has no score."""
    error = EvaluationFailed(verdict)
    if verdict.judged:
        message = (
            f"--metric {', '.join(metrics)}: unknown for {what}, which ended as {verdict.category}. Choose another"
        )
        error.args = (f"{message} metric or lane, or resume when the machine is less busy",)
    return error


def columns(verdict: Verdict) -> dict[str, Any]:
    """Return the columns of a proposal that come from its verdict."""
    return {
        "category": str(verdict.category),
        "message": verdict.message,
        "runtime_ms": verdict.runtime_ms,
        "speedup": verdict.speedup,
    }
