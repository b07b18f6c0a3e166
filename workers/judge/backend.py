"""What the judge asks of others: where numbers are kept that outlast an evaluation.

The Celery worker answers from Postgres (:mod:`workers.backend`), ``kqueue judge`` and the tests from memory. The judge
asks in a process of its own (:class:`RemoteBackend`), which holds neither.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, Protocol

from kqueue.contract import Measurement


class JudgeBackend(Protocol):
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


class InMemoryBackend:
    """Records that live as long as this object.

    Attributes:
        baselines: times of references by problem, environment and settings.
        doubts: GPUs that may be unfit, with the reasons.
    """

    def __init__(self) -> None:
        self.baselines: dict[tuple[str, str, str], Measurement] = {}
        self.doubts: list[tuple[str, str]] = []

    def environment(self, facts: dict[str, Any]) -> str:
        """As :meth:`JudgeBackend.environment`."""
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()

    def baseline(self, problem_hash: str, environment_hash: str, settings_key: str) -> Measurement | None:
        """As :meth:`JudgeBackend.baseline`."""
        return self.baselines.get((problem_hash, environment_hash, settings_key))

    def keep_baseline(
        self, problem_hash: str, environment_hash: str, settings_key: str, measurement: Measurement, *, replace: bool
    ) -> None:
        """As :meth:`JudgeBackend.keep_baseline`."""
        key = (problem_hash, environment_hash, settings_key)
        if replace or key not in self.baselines:
            self.baselines[key] = measurement

    def doubt(self, device: str, reason: str) -> None:
        """As :meth:`JudgeBackend.doubt`."""
        self.doubts.append((device, reason))


class RemoteBackend:
    """The records of a judge that asks another process for them; :func:`answer` is that one's side."""

    def __init__(self, ask: Callable[[list[Any]], Any]) -> None:
        """Ask by a function that takes a question and returns its answer, both of which have a JSON form."""
        self._ask = ask

    def environment(self, facts: dict[str, Any]) -> str:
        """As :meth:`JudgeBackend.environment`."""
        return self._ask(["environment", facts])

    def baseline(self, problem_hash: str, environment_hash: str, settings_key: str) -> Measurement | None:
        """As :meth:`JudgeBackend.baseline`."""
        known = self._ask(["baseline", problem_hash, environment_hash, settings_key])
        return None if known is None else Measurement.model_validate(known)

    def keep_baseline(
        self, problem_hash: str, environment_hash: str, settings_key: str, measurement: Measurement, *, replace: bool
    ) -> None:
        """As :meth:`JudgeBackend.keep_baseline`."""
        key = (problem_hash, environment_hash, settings_key)
        self._ask(["keep_baseline", *key, measurement.model_dump(mode="json"), replace])

    def doubt(self, device: str, reason: str) -> None:
        """As :meth:`JudgeBackend.doubt`."""
        self._ask(["doubt", device, reason])


def answer(backend: JudgeBackend, question: list[Any]) -> Any:
    """Answer a question of :class:`RemoteBackend` from records.

    Raises:
        ValueError: there is no such question.
    """
    match question:
        case ["environment", facts]:
            return backend.environment(facts)
        case ["baseline", *key]:
            known = backend.baseline(*key)
            return None if known is None else known.model_dump(mode="json")
        case ["keep_baseline", problem, environment, settings, measurement, replace]:
            kept = Measurement.model_validate(measurement)
            return backend.keep_baseline(problem, environment, settings, kept, replace=replace)
        case ["doubt", device, reason]:
            return backend.doubt(device, reason)
        case _:
            raise ValueError(f"no record is asked for so: {question[:1]}")
