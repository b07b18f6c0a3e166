"""The protocol of transports, which connect clients to a fleet, and the entries that producers submit."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import UUID

from kqueue.contract import Request, Verdict, parse_request
from kqueue.errors import InvalidRequest, KqueueError

#: A request, its fields by name, or the error by which it is refused.
Entry = Request | Mapping[str, Any] | InvalidRequest


@dataclass(frozen=True, slots=True)
class Accepted:
    """An accepted evaluation, which gets exactly one verdict. ``created`` is False if it existed before."""

    evaluation_id: UUID
    created: bool = field(compare=False)


class Transport(Protocol):
    """A connection to a fleet. Every method except :meth:`watch` blocks. All are safe to call from any thread.

    All methods raise :class:`~kqueue.errors.ServiceError` if the fleet cannot be used, and
    :class:`~kqueue.errors.KqueueError` after the transport is closed, and in another process than its creator.
    """

    _process: int
    _lock: threading.Lock
    _closed = False

    def __init__(self) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()

    def _check(self) -> None:
        """Raise KqueueError after closing, and in a forked process, which shares the sockets and has no threads."""
        if os.getpid() != self._process:
            raise KqueueError("this client belongs to another process: make one after the fork")
        if self._closed:
            raise KqueueError("the client is closed")

    def _begin_close(self) -> bool:
        """Mark the transport as closed. Return False if it is, or if its connections are another process's."""
        if os.getpid() != self._process:
            return False
        with self._lock:
            before, self._closed = self._closed, True
        return not before

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


def check(entry: Entry) -> Request:
    """Return a valid request for an entry, or raise InvalidRequest."""
    if isinstance(entry, Request):
        return entry
    if not isinstance(entry, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidRequest(f"request: must be a kqueue.Request or a mapping of its fields, not {type(entry)}")
    return parse_request(entry)


def check_each(entries: Iterable[Entry]) -> list[Request | InvalidRequest]:
    """Return a valid request or an error for each entry."""
    checked: list[Request | InvalidRequest] = []
    for entry in entries:
        try:
            checked.append(entry if isinstance(entry, InvalidRequest) else check(entry))
        except InvalidRequest as error:
            checked.append(error)
    return checked


def all_valid(results: Iterable[Request | InvalidRequest], *, numbered: bool = True) -> list[Request]:
    """Return all requests, or raise the first error. Its message gets the entry's index if ``numbered`` is True."""
    requests: list[Request] = []
    for number, result in enumerate(results):
        if isinstance(result, InvalidRequest):
            if numbered:
                result.args = (f"entry {number}: {result}",)
            raise result
        requests.append(result)
    return requests
