"""The judge backend that uses the fleet's database."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import structlog
from sqlalchemy import Engine

from kqueue.contract import Measurement
from kqueue.errors import DatabaseUnavailable, SchemaMismatch
from kqueue.store import baselines, evaluations, gpus

_log: Any = structlog.get_logger(__name__)
#: Seconds for which a task process retries a claim or a record while Postgres is away or has another version's schema.
#: Without a wait, workers would take all messages from Redis during an outage.
_PATIENCE_S: Final = 30.0
_RETRY_S: Final = 0.5
_T = TypeVar("_T")


def patiently(engine: Engine, work: Callable[[bool], _T]) -> _T:
    """Do work that needs Postgres, and repeat it for a while. ``work`` gets True if it has failed before.

    Raises:
        DatabaseUnavailable, SchemaMismatch: Postgres was away for longer, or has another version's schema.
    """
    deadline, again = time.monotonic() + _PATIENCE_S, False
    while True:
        try:
            return work(again)
        except (DatabaseUnavailable, SchemaMismatch) as error:
            if time.monotonic() >= deadline:
                raise
            # The connection is as old as this child, and another server can have taken over since then.
            engine.dispose()
            if not again:
                _log.warning("an evaluation waits for Postgres", reason=str(error))
            again = True
            time.sleep(_RETRY_S)


class StoredBackend:
    """The :class:`workers.judge.backend.JudgeBackend` of one attempt.

    Every method except :meth:`doubt` raises DatabaseUnavailable if Postgres is away, :meth:`environment` after a while.
    """

    def __init__(self, engine: Engine, attempt_id: int, owner: str, conditions: str | None) -> None:
        """Bind the backend to an attempt and its owner. ``conditions`` is None if no verdict is to be reused."""
        self._engine = engine
        self._attempt_id = attempt_id
        self._owner = owner
        self._conditions = conditions

    def environment(self, facts: dict[str, Any]) -> str:
        """Record the attempt's environment and return its hash. No deadline of a kernel runs yet, so it can wait."""
        key = self._engine, self._attempt_id, facts
        return patiently(self._engine, lambda _: evaluations.set_environment(*key, conditions=self._conditions))

    def baseline(self, problem_hash: str, environment_hash: str, settings_key: str) -> Measurement | None:
        """Return the cached baseline, or None."""
        return baselines.get(self._engine, problem_hash, environment_hash, settings_key, owner=self._owner)

    def keep_baseline(
        self, problem_hash: str, environment_hash: str, settings_key: str, measurement: Measurement, *, replace: bool
    ) -> None:
        """Cache a baseline."""
        key = (problem_hash, environment_hash, settings_key)
        baselines.put(self._engine, *key, measurement, owner=self._owner, replace=replace)

    def doubt(self, device: str, reason: str) -> None:
        """Request a GPU self-test. Without Postgres the request is lost, because the verdict matters more."""
        with contextlib.suppress(DatabaseUnavailable):
            gpus.ask_for_test(self._engine, device, reason=reason, failed=True)
