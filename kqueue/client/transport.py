"""The interface between a client and its way to a fleet."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol
from uuid import UUID

from kqueue.contract import Request, Verdict
from kqueue.errors import InvalidRequest


class Accepted(NamedTuple):
    """An accepted evaluation, which ends in one verdict.

    Attributes:
        evaluation_id: its id.
        created: False if an earlier submission made it.
    """

    evaluation_id: UUID
    created: bool


class Transport(Protocol):
    """A way to a fleet. Every method blocks but :meth:`watch`, and any thread may call it.

    All methods raise :class:`~kqueue.errors.ServiceError` if the fleet cannot be used, and
    :class:`~kqueue.errors.KqueueError` once the transport is closed.
    """

    def submit(self, requests: Sequence[Request], allow_idle_lane: bool) -> list[Accepted]:
        """Accept all requests, or raise what is wrong with one of them and accept none.

        Args:
            requests: the requests.
            allow_idle_lane: accept a lane that no live worker serves now.
        """
        ...

    def submit_each(
        self, entries: Sequence[Request | InvalidRequest], allow_idle_lane: bool
    ) -> list[Accepted | InvalidRequest]:
        """Accept every request that can be accepted, and return what is wrong with the others in their places.

        Args:
            entries: the requests. Entries that were refused before are returned as they are.
            allow_idle_lane: accept a lane that no live worker serves now.
        """
        ...

    def batch(self, name: str) -> list[UUID]:
        """Return the evaluations of a batch, in the order of their submission."""
        ...

    def verdict(self, evaluation_id: UUID) -> Verdict | None:
        """Return the verdict, None while there is none, or raise UnknownEvaluation."""
        ...

    def cancel(self, evaluation_id: UUID) -> bool:
        """End the evaluation; return False if it had its verdict, or raise UnknownEvaluation."""
        ...

    def watch(self, evaluation_id: UUID) -> Future[Verdict]:
        """Return a future of the verdict. Whoever stops waiting cancels it."""
        ...

    def close(self) -> None:
        """Release everything; futures that wait fail."""
        ...
