"""What the judge asks of others: where numbers are kept that outlast an evaluation.

The Celery worker answers from Postgres (:mod:`workers.records`), ``kqueue judge`` and the tests from memory.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Protocol

from kqueue.contract import Measurement


class Records(Protocol):
    """The records of one evaluation's judge."""

    def environment(self, facts: dict[str, Any]) -> str:
        """Note what the evaluation runs on.

        Args:
            facts: what numbers depend on and nothing that changes between evaluations: device, versions, host.

        Returns:
            the environment's hash.
        """
        ...

    def baseline(self, problem_hash: str, environment_hash: str, settings_key: str) -> Measurement | None:
        """Return the time of a reference that is known; None where there is none."""
        ...

    def keep_baseline(
        self, problem_hash: str, environment_hash: str, settings_key: str, measurement: Measurement, *, replace: bool
    ) -> None:
        """Keep the time of a reference. The first one stays, unless it is to be replaced."""
        ...

    def doubt(self, device: str, reason: str) -> None:
        """Say that a GPU may be unfit, so that it is tested before it is used again."""
        ...


class InMemoryRecords:
    """Records that live as long as this object.

    Attributes:
        baselines: times of references by problem, environment and settings.
        doubts: GPUs that may be unfit, with the reasons.
    """

    def __init__(self) -> None:
        self.baselines: dict[tuple[str, str, str], Measurement] = {}
        self.doubts: list[tuple[str, str]] = []

    def environment(self, facts: dict[str, Any]) -> str:
        """As :meth:`Records.environment`."""
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()

    def baseline(self, problem_hash: str, environment_hash: str, settings_key: str) -> Measurement | None:
        """As :meth:`Records.baseline`."""
        return self.baselines.get((problem_hash, environment_hash, settings_key))

    def keep_baseline(
        self, problem_hash: str, environment_hash: str, settings_key: str, measurement: Measurement, *, replace: bool
    ) -> None:
        """As :meth:`Records.keep_baseline`."""
        key = (problem_hash, environment_hash, settings_key)
        if replace or key not in self.baselines:
            self.baselines[key] = measurement

    def doubt(self, device: str, reason: str) -> None:
        """As :meth:`Records.doubt`."""
        self.doubts.append((device, reason))
