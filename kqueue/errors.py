"""Every exception that kqueue raises on purpose.

::

    KqueueError
    ├── ConfigError             settings that cannot work
    ├── InvalidRequest          a request refused before anything was written
    │   ├── UnknownLane         the lane's name is not one
    │   ├── LaneUnavailable     no worker serves the lane
    │   ├── IdempotencyConflict a known idempotency key, given for something else
    │   └── UnknownProblem      no stored problem has the hash that the request names
    ├── UnknownEvaluation       no evaluation has this id
    ├── WaitTimeout             the verdict did not come in time
    ├── AccessRefused           the server needs a token, or one with a wider scope
    ├── JudgeUnavailable        this machine cannot judge
    ├── EvaluationFailed        a verdict that says nothing about the kernel, where only a result can be returned
    └── ServiceError            a service of the fleet failed, or has no room
        ├── BudgetSpent         the token's budget is used up
        ├── DatabaseUnavailable Postgres cannot be reached or refused
        ├── BrokerUnavailable   Redis cannot be reached or refused
        ├── ServerUnavailable   `kqueue serve` cannot be reached, or is full
        ├── SchemaMismatch      the database's schema is not this version's
        ├── ProposerFailed      a search's model or command wrote no kernel
        └── LocalFleetError     the one-machine fleet or an embedded service failed
            └── HomeInUse       another process has its home

A kernel's failure is never an exception: it is a :class:`kqueue.Verdict`.
Each message says what to do about it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from uuid import UUID

    from kqueue.contract import Verdict


class KqueueError(Exception):
    """The base class of all exceptions that kqueue raises on purpose."""


class ConfigError(KqueueError):
    """A setting has an invalid value; the message names it."""


class InvalidRequest(KqueueError, ValueError):
    """A request was refused before anything was written; the message names the field and the fix."""


class UnknownLane(InvalidRequest):
    """The lane's name is not one."""


class LaneUnavailable(InvalidRequest):
    """No live worker serves the lane, so the evaluation would only wait."""


class IdempotencyConflict(InvalidRequest):
    """A known idempotency key was given for another problem, kernel or lane, with other settings, or to judge anew.

    Attributes:
        keys: the keys in question.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self.keys = frozenset(keys)
        names = ", ".join(repr(key) for key in sorted(self.keys))
        super().__init__(
            f"idempotency_key: {names} was used for another problem, kernel or lane, with other settings, or where a "
            "reused verdict would do; use a new key"
        )


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
    """The verdict did not come in time; the evaluation continues.

    Attributes:
        evaluation_ids: all evaluations that were waited for, in order, including those whose verdicts have come.
    """

    def __init__(self, message: str, evaluation_ids: Iterable[UUID] = ()) -> None:
        self.evaluation_ids = tuple(evaluation_ids)
        super().__init__(message)


class EvaluationFailed(KqueueError):
    """The verdict says nothing about the kernel, and the caller's interface can only return a result.

    The fleet or the problem failed, or the evaluation was cancelled or expired. Do not count it as a bad kernel.

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


class JudgeUnavailable(KqueueError):
    """This machine cannot judge, or not this kernel; the message says what it lacks."""


class AccessRefused(KqueueError):
    """The server needs a token, does not know the one given, or needs one with a wider scope."""


class ServiceError(KqueueError):
    """A service that the fleet needs is missing or refused."""


class DatabaseUnavailable(ServiceError):
    """Postgres cannot be reached or refused the connection."""


class BrokerUnavailable(ServiceError):
    """Redis cannot be reached or refused the connection."""


class ServerUnavailable(ServiceError):
    """The address does not answer, is not a ``kqueue serve``, or takes no more evaluations for now."""


class BudgetSpent(ServiceError):
    """The token's budget is used up, so nothing new is accepted for a while; what was accepted is judged.

    Attributes:
        budget_s: the budget, in seconds of slots.
        window_s: the time in which they may be used, in seconds.
        retry_after_s: seconds after which there is some left, if nothing more is used.
    """

    def __init__(self, budget_s: float, window_s: float, retry_after_s: float) -> None:
        self.budget_s = budget_s
        self.window_s = window_s
        self.retry_after_s = max(1.0, retry_after_s)
        super().__init__(
            f"this token's budget of {budget_s:g} s of slots in {window_s:g} s is used up: submit again in "
            f"{math.ceil(self.retry_after_s)} s"
        )

    def __reduce__(self) -> tuple[type[BudgetSpent], tuple[float, float, float]]:
        return type(self), (self.budget_s, self.window_s, self.retry_after_s)


class SchemaMismatch(ServiceError):
    """The database's schema does not match this version of kqueue."""


class ProposerFailed(ServiceError):
    """The model or command that is to write kernels for a search wrote none."""


class LocalFleetError(ServiceError):
    """The one-machine fleet or one of its embedded services failed."""


class HomeInUse(LocalFleetError):
    """Another process uses the home of the one-machine fleet or service. Stop it, or use its fleet."""
