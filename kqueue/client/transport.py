"""The protocol of transports, which connect clients to a fleet."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol
from uuid import UUID

from kqueue.contract import Request, Verdict
from kqueue.errors import InvalidRequest


class Accepted(NamedTuple):
    """An accepted evaluation, which gets exactly one verdict. ``created`` is False if it existed before."""

    evaluation_id: UUID
    created: bool


class Transport(Protocol):
    """A connection to a fleet. Every method except :meth:`watch` blocks. All are safe to call from any thread.

    All methods raise :class:`~kqueue.errors.ServiceError` if the fleet cannot be used, and
    :class:`~kqueue.errors.KqueueError` after the transport is closed.
    """

    def submit(self, requests: Sequence[Request], allow_idle_lane: bool) -> list[Accepted]:
        """Submit all requests, or raise the error of one of them and submit none.

        ``allow_idle_lane`` permits lanes that no live worker serves now.
        """
        ...

    def submit_each(
        self, entries: Sequence[Request | InvalidRequest], allow_idle_lane: bool
    ) -> list[Accepted | InvalidRequest]:
        """Submit every valid request, and return the results in the order of ``entries``.

        The result of a refused request is its error. Entries that are errors are returned unchanged.
        """
        ...

    def batch(self, name: str) -> list[UUID]:
        """Return the evaluations of a batch in the order of submission."""
        ...

    def verdict(self, evaluation_id: UUID) -> Verdict | None:
        """Return the verdict, or None if there is none yet. Raise UnknownEvaluation for an unknown id."""
        ...

    def cancel(self, evaluation_id: UUID) -> bool:
        """Cancel the evaluation. Return False if it had its verdict. Raise UnknownEvaluation for an unknown id."""
        ...

    def watch(self, evaluation_id: UUID) -> Future[Verdict]:
        """Return a future of the verdict. A caller that stops waiting must cancel it."""
        ...

    def close(self) -> None:
        """Close all connections. Pending futures fail."""
        ...
