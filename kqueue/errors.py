"""Every exception that kqueue raises on purpose.

::

    KqueueError
    ├── ConfigError             settings that cannot work
    ├── InvalidRequest          a request refused before anything was written
    │   ├── UnknownLane         the lane's name is not one
    │   ├── LaneUnavailable     no worker serves the lane
    │   ├── IdempotencyConflict a known idempotency key, given for another problem or kernel
    │   └── UnknownProblem      no stored problem has the hash that the request names
    ├── UnknownEvaluation       no evaluation has this id
    ├── WaitTimeout             the verdict did not come in the time given
    ├── AccessRefused           the server wants a token, or one that may do more
    ├── EvaluationFailed        a verdict that tells nothing of the kernel, where only a result can be returned
    └── ServiceError            something the fleet stands on
        ├── DatabaseUnavailable Postgres cannot be reached or refused
        ├── BrokerUnavailable   Redis cannot be reached or refused
        ├── ServerUnavailable   `kqueue serve` cannot be reached, or has no room
        ├── SchemaMismatch      the database's schema is not this version's
        └── LocalFleetError     the one-machine fleet or an embedded service failed
            └── HomeInUse       another process has its home

A kernel's failure is never an exception: it is a :class:`kqueue.Verdict`.
Each message says what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING
from uuid import UUID

if TYPE_CHECKING:
    from kqueue.contract import Verdict


class KqueueError(Exception):
    """The root of all exceptions that kqueue raises on purpose."""


class ConfigError(KqueueError):
    """Settings that cannot work; the message names the setting."""


class InvalidRequest(KqueueError, ValueError):
    """A request refused before anything was written; the message names the field and the fix."""


class UnknownLane(InvalidRequest):
    """The lane's name is not one."""


class LaneUnavailable(InvalidRequest):
    """No live worker serves the lane, so the evaluation would only wait."""


class IdempotencyConflict(InvalidRequest):
    """A known idempotency key was given for another problem or kernel.

    Attributes:
        keys: the keys in question.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self.keys = frozenset(keys)
        names = ", ".join(repr(key) for key in sorted(self.keys))
        super().__init__(f"idempotency_key: {names} was used for another problem or kernel; use a new key")


class UnknownProblem(InvalidRequest):
    """No stored problem has the hash that the request names.

    Attributes:
        hashes: the hashes in question.
    """

    def __init__(self, hashes: Iterable[str]) -> None:
        self.hashes = frozenset(hashes)
        names = ", ".join(f"sha256:{name}" for name in sorted(self.hashes))
        super().__init__(f"problem: unknown problem {names}: nobody has submitted its source yet; give the source")


class UnknownEvaluation(KqueueError, LookupError):
    """No evaluation has this id, or belongs to this batch."""

    def __init__(self, name: UUID | str, *, what: str = "the id") -> None:
        super().__init__(f"no evaluation has {what} {name}: see `kqueue results` for those that exist")


class WaitTimeout(KqueueError, TimeoutError):
    """The verdict did not come within the time given; the evaluation goes on.

    Attributes:
        evaluation_ids: what was waited for, in order, those included whose verdicts have come.
    """

    def __init__(self, message: str, evaluation_ids: Iterable[UUID] = ()) -> None:
        self.evaluation_ids = tuple(evaluation_ids)
        super().__init__(message)


class EvaluationFailed(KqueueError):
    """A verdict that tells nothing of the kernel, where the caller's interface has no place for one.

    The fleet or the problem failed, or the evaluation was cancelled or expired. Taking it for a bad kernel
    would be wrong.

    Attributes:
        verdict: the verdict.
    """

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        super().__init__(
            f"{verdict.category} (to blame: {verdict.blame}): {verdict.message}; evaluation {verdict.evaluation_id}"
        )

    def __reduce__(self) -> tuple[type[EvaluationFailed], tuple[Verdict]]:
        return type(self), (self.verdict,)


class AccessRefused(KqueueError):
    """The server wants a token, does not know the one given, or wants one that may do more."""


class ServiceError(KqueueError):
    """Something that the fleet stands on is missing or refused."""


class DatabaseUnavailable(ServiceError):
    """Postgres cannot be reached or refused the connection."""


class BrokerUnavailable(ServiceError):
    """Redis cannot be reached or refused the connection."""


class ServerUnavailable(ServiceError):
    """``kqueue serve`` cannot be reached, is not one, or takes no more evaluations for now."""


class SchemaMismatch(ServiceError):
    """The database's schema is not the one that this version of kqueue works with."""


class LocalFleetError(ServiceError):
    """The one-machine fleet or one of its embedded services failed."""


class HomeInUse(LocalFleetError):
    """Another process has the home of the one-machine fleet or service: see which one, or use its fleet."""
