"""The judge backend that uses the fleet's database."""

from __future__ import annotations

import contextlib
from typing import Any

from sqlalchemy import Engine

from kqueue.contract import Measurement
from kqueue.errors import DatabaseUnavailable
from kqueue.store import baselines, evaluations, gpus


class StoredBackend:
    """The :class:`workers.judge.backend.JudgeBackend` of one attempt.

    Every method except :meth:`doubt` raises DatabaseUnavailable if Postgres is away.
    """

    def __init__(self, engine: Engine, attempt_id: int, owner: str, conditions: str | None) -> None:
        """Bind the backend to an attempt and its owner. ``conditions`` is None if no verdict is to be reused."""
        self._engine = engine
        self._attempt_id = attempt_id
        self._owner = owner
        self._conditions = conditions

    def environment(self, facts: dict[str, Any]) -> str:
        """Record the attempt's environment and return its hash."""
        return evaluations.set_environment(self._engine, self._attempt_id, facts, conditions=self._conditions)

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
