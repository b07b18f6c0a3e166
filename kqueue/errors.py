"""All exceptions that kqueue raises intentionally.

::

    KqueueError
    ├── ConfigError             settings that cannot work
    ├── InvalidRequest          a request refused before any write
    │   ├── UnknownLane         no lane has this name
    │   ├── LaneUnavailable     no worker serves the lane
    │   ├── IdempotencyConflict an idempotency key used again for a different request
    │   └── UnknownProblem      no stored problem has the hash that the request names
    ├── UnknownEvaluation       no evaluation has this id
    ├── WaitTimeout             the verdict did not arrive in time
    ├── AccessRefused           the server needs a token, or one with a wider scope
    ├── JudgeUnavailable        this machine cannot judge
    ├── EvaluationFailed        a verdict without a result for the kernel, where a result must be returned
    └── ServiceError            a service of the fleet failed, or has no capacity left
        ├── BudgetSpent         the token's budget is used up
        ├── DatabaseUnavailable Postgres is unreachable or refused the connection
        ├── BrokerUnavailable   Redis is unreachable or refused the connection
        ├── ServerUnavailable   `kqueue serve` is unreachable or full
        ├── SchemaMismatch      the database's schema does not match this version
        ├── ProposerFailed      the model or command of a search wrote no kernel
        └── LocalFleetError     the one-machine fleet or an embedded service failed
            └── HomeInUse       another process uses its home directory

A kernel's failure is a :class:`kqueue.Verdict`, never an exception. Each message names the remedy.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from uuid import UUID

    from kqueue.contract import Verdict


class KqueueError(Exception):
    """The base class of all exceptions that kqueue raises intentionally."""


class ConfigError(KqueueError):
    """A setting has an invalid value. The message names it."""


class InvalidRequest(KqueueError, ValueError):
    """A request was refused before any write. The message names the field and the remedy."""


class UnknownLane(InvalidRequest):
    """No lane has this name."""


class LaneUnavailable(InvalidRequest):
    """No live worker serves the lane, so the evaluation would wait indefinitely."""


class IdempotencyConflict(InvalidRequest):
    """An idempotency key was used again for another problem, kernel or lane, other settings, or to forbid reuse."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.keys = frozenset(keys)
        names = ", ".join(repr(key) for key in sorted(self.keys))
        super().__init__(
            f"idempotency_key: {names} was used for another problem, kernel or lane, with other settings, or with "
            "reuse allowed: use a new key"
        )


class UnknownProblem(InvalidRequest):
    """No stored problem or tree has the hash that the request names."""

    def __init__(self, hashes: Iterable[str]) -> None:
        self.hashes = frozenset(hashes)
        names = ", ".join(f"sha256:{name}" for name in sorted(self.hashes))
        super().__init__(
            f"problem: unknown problem {names}: its source was never submitted, so give the source "
            "(of a tree that a source names: in `trees`)"
        )


class UnknownEvaluation(KqueueError, LookupError):
    """No evaluation or batch has this name."""

    def __init__(self, name: UUID | str, *, what: str = "the id") -> None:
        super().__init__(f"no evaluation has {what} {name}: see `kqueue results` for those that exist")


class WaitTimeout(KqueueError, TimeoutError):
    """The verdict did not arrive in time. The evaluation continues.

    Attributes:
        evaluation_ids: all evaluations that were waited for, in order, including those with a verdict.
    """

    def __init__(self, message: str, evaluation_ids: Iterable[UUID] = ()) -> None:
        self.evaluation_ids = tuple(evaluation_ids)
        super().__init__(message)


class EvaluationFailed(KqueueError):
    """The verdict has no result for the kernel, and the caller's interface can only return a result.

    The fleet or the problem failed, or the evaluation was cancelled, expired or needs a GPU. Do not count it as a bad
    kernel.
    """

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        super().__init__(
            f"{verdict.category} (to blame: {verdict.blame}): {verdict.message} (evaluation {verdict.evaluation_id})"
        )

    def __reduce__(self) -> tuple[type[EvaluationFailed], tuple[Verdict]]:
        return type(self), (self.verdict,)


class JudgeUnavailable(KqueueError):
    """This machine cannot judge this kernel, or any. The message names the missing part."""


class AccessRefused(KqueueError):
    """The server needs a token, does not know the one given, or needs one with a wider scope."""


class ServiceError(KqueueError):
    """A service that the fleet needs is missing or refused the request."""


class DatabaseUnavailable(ServiceError):
    """Postgres is unreachable or refused the connection."""


class BrokerUnavailable(ServiceError):
    """Redis is unreachable or refused the connection."""


class ServerUnavailable(ServiceError):
    """The address does not answer, is not a ``kqueue serve``, or accepts no more evaluations for now."""


class BudgetSpent(ServiceError):
    """The token's budget is used up. New submissions are refused, but accepted evaluations are still judged.

    Attributes:
        budget_s: the budget in slot seconds.
        window_s: the length in seconds of the window that the budget covers.
        retry_after_s: seconds until budget is available again, if no more is used.
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
    """The model or command of a search wrote no kernel."""


class LocalFleetError(ServiceError):
    """The one-machine fleet or one of its embedded services failed."""


class HomeInUse(LocalFleetError):
    """Another process uses the home directory of the one-machine fleet or service. Stop it, or use its fleet."""
