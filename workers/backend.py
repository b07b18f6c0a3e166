"""The judge's records in the fleet's database."""

from __future__ import annotations

import contextlib
from typing import Any

from sqlalchemy import Engine

from kqueue.contract import Measurement
from kqueue.errors import DatabaseUnavailable
from kqueue.store import baselines, evaluations, gpus


class StoredBackend:
    """:class:`workers.judge.backend.JudgeBackend` of one attempt. Each raises DatabaseUnavailable without Postgres."""

    def __init__(self, engine: Engine, attempt_id: int, conditions: str | None) -> None:
        """Say whose records these are.

        Args:
            engine: the fleet's database.
            attempt_id: the attempt's row.
            conditions: :attr:`workers.judge.api.Judges.conditions`; None if no verdict is to be reused.
        """
        self._engine = engine
        self._attempt_id = attempt_id
        self._conditions = conditions

    def environment(self, facts: dict[str, Any]) -> str:
        """Note the attempt's environment."""
        return evaluations.set_environment(self._engine, self._attempt_id, facts, conditions=self._conditions)

    def baseline(self, problem_hash: str, environment_hash: str, settings_key: str) -> Measurement | None:
        """Look a baseline up."""
        return baselines.get(self._engine, problem_hash, environment_hash, settings_key)

    def keep_baseline(
        self, problem_hash: str, environment_hash: str, settings_key: str, measurement: Measurement, *, replace: bool
    ) -> None:
        """Cache a baseline."""
        baselines.put(self._engine, problem_hash, environment_hash, settings_key, measurement, replace=replace)

    def doubt(self, device: str, reason: str) -> None:
        """Have the GPU tested. Without Postgres the doubt is lost: the verdict counts more."""
        with contextlib.suppress(DatabaseUnavailable):
            gpus.ask_for_test(self._engine, device, reason=reason, failed=True)
