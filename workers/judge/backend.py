"""The judge backend: the store of environments, baselines and suspect GPU reports, which outlive an evaluation.

Celery workers use Postgres (:mod:`workers.backend`). ``kqueue judge`` and the tests use memory. A judge process sends
its queries to the process that owns the backend (:class:`RemoteBackend`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, Protocol

from kqueue.contract import Measurement


class JudgeBackend(Protocol):
    """The interface of the backend of one evaluation."""

    def environment(self, facts: dict[str, Any]) -> str:
        """Store the evaluation's environment, and return its hash.

        Args:
            facts: all facts on which measurements depend: device, versions and host. They must not change between
                evaluations.
        """
        ...

    def baseline(self, problem_hash: str, environment_hash: str, settings_key: str) -> Measurement | None:
        """Return the stored time of a reference, or None if there is none."""
        ...

    def keep_baseline(
        self, problem_hash: str, environment_hash: str, settings_key: str, measurement: Measurement, *, replace: bool
    ) -> None:
        """Store the time of a reference. Without ``replace`` an existing time is kept."""
        ...

    def doubt(self, device: str, reason: str) -> None:
        """Report a suspect GPU, so that it is tested before it is used again."""
        ...


class InMemoryBackend:
    """A backend that keeps its data in this object."""

    def __init__(self) -> None:
        #: Times of references by the hashes of problem and environment, and the settings' key.
        self.baselines: dict[tuple[str, str, str], Measurement] = {}
        #: Suspect GPUs with the reasons.
        self.doubts: list[tuple[str, str]] = []

    def environment(self, facts: dict[str, Any]) -> str:
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()

    def baseline(self, problem_hash: str, environment_hash: str, settings_key: str) -> Measurement | None:
        return self.baselines.get((problem_hash, environment_hash, settings_key))

    def keep_baseline(
        self, problem_hash: str, environment_hash: str, settings_key: str, measurement: Measurement, *, replace: bool
    ) -> None:
        key = (problem_hash, environment_hash, settings_key)
        if replace or key not in self.baselines:
            self.baselines[key] = measurement

    def doubt(self, device: str, reason: str) -> None:
        self.doubts.append((device, reason))


class RemoteBackend:
    """A backend that queries another process, which answers by :func:`answer`."""

    def __init__(self, ask: Callable[[list[Any]], Any]) -> None:
        """Use a function that sends a query and returns its answer. Both have a JSON form."""
        self._ask = ask

    def environment(self, facts: dict[str, Any]) -> str:
        return self._ask(["environment", facts])

    def baseline(self, problem_hash: str, environment_hash: str, settings_key: str) -> Measurement | None:
        stored = self._ask(["baseline", problem_hash, environment_hash, settings_key])
        return None if stored is None else Measurement.model_validate(stored)

    def keep_baseline(
        self, problem_hash: str, environment_hash: str, settings_key: str, measurement: Measurement, *, replace: bool
    ) -> None:
        key = (problem_hash, environment_hash, settings_key)
        self._ask(["keep_baseline", *key, measurement.model_dump(mode="json"), replace])

    def doubt(self, device: str, reason: str) -> None:
        self._ask(["doubt", device, reason])


def answer(backend: JudgeBackend, question: list[Any]) -> Any:
    """Answer a query of :class:`RemoteBackend` from another backend.

    Raises:
        ValueError: the query is not supported.
    """
    match question:
        case ["environment", facts]:
            return backend.environment(facts)
        case ["baseline", *key]:
            stored = backend.baseline(*key)
            return None if stored is None else stored.model_dump(mode="json")
        case ["keep_baseline", problem, environment, settings, measurement, replace]:
            kept = Measurement.model_validate(measurement)
            return backend.keep_baseline(problem, environment, settings, kept, replace=replace)
        case ["doubt", device, reason]:
            return backend.doubt(device, reason)
        case _:
            raise ValueError(f"not a query of the judge backend: {question[:1]}")
