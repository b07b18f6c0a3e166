"""The interfaces of clients, for threads and for asyncio, with their handles on accepted evaluations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TypedDict, TypeVar, Unpack
from uuid import UUID

from kqueue import registry
from kqueue.client.transport import Accepted, Entry, Transport, all_valid, check, check_each
from kqueue.contract import Request, Settings, Verdict
from kqueue.errors import InvalidRequest, UnknownEvaluation, WaitTimeout
from kqueue.states import Priority

if TYPE_CHECKING:
    from kqueue.config import Config
    from kqueue.features.duel.client import AsyncDuels as _AsyncAttached
    from kqueue.features.duel.client import Duels as _Attached
else:
    _Attached, _AsyncAttached = (
        type(place, tuple(registry.attached(place)), {}) for place in ("client", "async_client")
    )

_T = TypeVar("_T")


class Fields(TypedDict, total=False):
    """The fields of a :class:`Request`, which documents them. None stands for a field's default."""

    problem: str | None
    kernel: str | None
    backend: str | None
    lane: str
    settings: Settings | Mapping[str, Any] | None
    problem_label: str | None
    kernel_label: str | None
    batch: str | None
    idempotency_key: str | None
    priority: Priority | str | None
    producer: str | None
    reuse: bool | None
    queue_wait_s: float | None
    callback_url: str | None
    batch_callback_url: str | None


class Options(Fields, total=False):
    """The keyword arguments of :meth:`Client.submit`."""

    allow_idle_lane: bool


@dataclass(frozen=True, slots=True)
class Ticket(Accepted):
    """A handle on an accepted evaluation.

    The evaluation continues without its ticket. :meth:`Client.get` returns a new one. ``created`` is False if the
    evaluation existed before.
    """

    _transport: Transport = field(repr=False, compare=False)

    def wait(self, timeout: float | None = None) -> Verdict:
        """Wait for the verdict and return it, or raise WaitTimeout after ``timeout`` seconds.

        The evaluation continues after a timeout.
        """
        return _wait_all(self._transport, [self.evaluation_id], timeout)[0]

    def watch(self) -> Future[Verdict]:
        """Return a future of the verdict. A caller that stops waiting should cancel it."""
        return self._transport.watch(self.evaluation_id)

    def verdict(self) -> Verdict | None:
        """Return the verdict, or None if there is none yet."""
        return self._transport.verdict(self.evaluation_id)

    def done(self) -> bool:
        """Return True if there is a verdict."""
        return self.verdict() is not None

    def cancel(self) -> bool:
        """Cancel the evaluation, and kill it if it runs. Return False if it already had its verdict."""
        return self._transport.cancel(self.evaluation_id)


@dataclass(frozen=True, slots=True)
class AsyncTicket(Accepted):
    """:class:`Ticket` for asyncio."""

    _transport: Transport = field(repr=False, compare=False)

    async def wait(self, timeout: float | None = None) -> Verdict:
        """Wait for the verdict and return it, or raise WaitTimeout after ``timeout`` seconds."""
        return (await _await_all(self._transport, [self.evaluation_id], timeout))[0]

    async def verdict(self) -> Verdict | None:
        """Return the verdict, or None if there is none yet."""
        return await asyncio.to_thread(self._transport.verdict, self.evaluation_id)

    async def done(self) -> bool:
        """Return True if there is a verdict."""
        return await self.verdict() is not None

    async def cancel(self) -> bool:
        """Cancel the evaluation, and kill it if it runs. Return False if it already had its verdict."""
        return await asyncio.to_thread(self._transport.cancel, self.evaluation_id)


class _ToServices:
    """A client of a fleet's own Postgres and Redis."""

    def __init__(
        self, config: Config | None = None, *, database_url: str | None = None, redis_url: str | None = None
    ) -> None:
        """Create a client, which connects at its first use.

        Args:
            config: all settings. By default :func:`kqueue.config.load` reads the environment and finds a fleet of
                ``kqueue up`` on this machine.
            database_url: URL of Postgres, instead of the configured one.
            redis_url: URL of Redis, instead of the configured one.

        Raises:
            ConfigError: no database is set.
        """
        # Clients over HTTP must load neither Celery nor SQLAlchemy.
        from kqueue.client.database import DatabaseTransport

        self._transport: Transport = DatabaseTransport(config, database_url=database_url, redis_url=redis_url)


class Client(_Attached, _ToServices):
    """The connection of a producer to a fleet.

    ::

        with Client() as kq:
            ticket = kq.submit(problem=..., kernel=..., backend="cuda", lane="gpu")
            verdict = ticket.wait(timeout=60)
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections. Evaluations continue. Waiting threads get a ``KqueueError``."""
        self._transport.close()

    def submit(
        self, request: Request | None = None, *, allow_idle_lane: bool = False, **fields: Unpack[Fields]
    ) -> Ticket:
        """Submit one evaluation, given by a :class:`Request` or by its fields.

        Args:
            request: the complete request. It can be combined only with ``allow_idle_lane``.
            allow_idle_lane: accept a lane (not ``auto``) that no live worker serves now.
            fields: the fields of a :class:`Request`, which documents them.

        Raises:
            InvalidRequest: a field is wrong. The message names it and the fix.
            LaneUnavailable: no live worker serves the lane.
            UnknownProblem: no stored problem has the hash in ``problem``.
            DatabaseUnavailable: Postgres cannot be used.
            SchemaMismatch: the database belongs to another version of kqueue.
        """
        return self.submit_batch([_one(request, fields)], allow_idle_lane=allow_idle_lane)[0]

    def submit_batch(self, entries: Iterable[Entry], *, allow_idle_lane: bool = False) -> list[Ticket]:
        """Submit all entries or none, in one transaction, and return tickets in the order of ``entries``.

        The errors are the ones of :meth:`submit`. The message of an ``InvalidRequest`` has the entry's index.
        """
        accepted = self._transport.submit(all_valid(check_each(entries)), allow_idle_lane)
        return [Ticket(one.evaluation_id, one.created, self._transport) for one in accepted]

    def submit_each(self, entries: Iterable[Entry], *, allow_idle_lane: bool = False) -> list[Ticket | InvalidRequest]:
        """Submit every valid entry, and return a ticket for each in the order of ``entries``.

        Entries are requests, or mappings of their fields. For a refused entry the list contains the
        :class:`InvalidRequest`, which is not raised. After ``DatabaseUnavailable`` or ``SchemaMismatch`` nothing was
        submitted, except over HTTP: a :class:`RemoteClient` sends 200 entries at most in one request, and the entries
        of earlier requests are submitted. With idempotency keys all entries can be submitted again.
        """
        results = self._transport.submit_each(check_each(entries), allow_idle_lane)
        return _tickets(Ticket, results, self._transport)

    def evaluate(
        self, request: Request | None = None, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Verdict:
        """Submit one evaluation and wait for its verdict. All errors of :meth:`submit` are possible.

        Args:
            request: the complete request.
            timeout: seconds from submission, or None for no limit.
            options: the other arguments of :meth:`submit`.

        Raises:
            WaitTimeout: the verdict did not come in time. ``evaluation_ids`` names the evaluation.
        """
        return self.submit(request, **options).wait(timeout)

    def evaluate_batch(
        self, entries: Iterable[Entry], *, timeout: float | None = None, allow_idle_lane: bool = False
    ) -> list[Verdict | InvalidRequest]:
        """Submit every valid entry, wait, and return the verdicts in the order of ``entries``.

        :meth:`submit_each` documents the entries, and :meth:`evaluate` the timeout.

        Raises:
            WaitTimeout: a verdict did not come in time. ``evaluation_ids`` names all submitted evaluations, and
                :meth:`verdict` returns the verdicts that exist.
        """
        results = self.submit_each(entries, allow_idle_lane=allow_idle_lane)
        verdicts = iter(self.wait_all([one for one in results if isinstance(one, Ticket)], timeout))
        return [next(verdicts) if isinstance(one, Ticket) else one for one in results]

    def get(self, evaluation_id: UUID | str) -> Ticket:
        """Return a ticket for an existing evaluation of any producer, or raise UnknownEvaluation."""
        identity = _id_of(evaluation_id)
        self.verdict(identity)  # raises UnknownEvaluation
        return Ticket(identity, False, self._transport)

    def batch(self, name: str) -> list[Ticket]:
        """Return tickets for all evaluations of a batch in the order of submission, or none for an unknown batch.

        A producer can use this after a crash to find its evaluations.
        """
        return [Ticket(identity, False, self._transport) for identity in self._transport.batch(name)]

    def verdict(self, evaluation_id: UUID | str) -> Verdict | None:
        """Return an evaluation's verdict, or None if it has none yet. Raise UnknownEvaluation for an unknown id."""
        return self._transport.verdict(_id_of(evaluation_id))

    def cancel(self, evaluation_id: UUID | str) -> bool:
        """Cancel an evaluation, and kill it if it runs. Return False if it already had its verdict.

        Raise UnknownEvaluation for an unknown id.
        """
        return self._transport.cancel(_id_of(evaluation_id))

    def wait_all(self, tickets: Iterable[Ticket], timeout: float | None = None) -> list[Verdict]:
        """Wait for the verdicts of all tickets, and return them in order, or raise WaitTimeout."""
        return _wait_all(self._transport, [ticket.evaluation_id for ticket in tickets], timeout)

    def as_completed(self, tickets: Iterable[Ticket], timeout: float | None = None) -> Iterator[tuple[Ticket, Verdict]]:
        """Yield each ticket with its verdict, in the order in which the verdicts come.

        Raises:
            WaitTimeout: a verdict did not come within ``timeout`` seconds from the call.
        """
        pending = {self._transport.watch(ticket.evaluation_id): ticket for ticket in tickets}
        ids = [ticket.evaluation_id for ticket in pending.values()]
        deadline = Deadline(timeout)
        with _cancelled(pending):
            while pending:
                done, _ = wait(pending, deadline.left_s(), FIRST_COMPLETED)
                if not done:
                    raise _too_late(len(pending), ids, timeout)
                for future in done:
                    yield pending.pop(future), future.result()


class AsyncClient(_AsyncAttached, _ToServices):
    """:class:`Client` for asyncio, with coroutines as methods. Any number of them can wait at once.

    ::

        async with AsyncClient() as kq:
            verdict = await kq.evaluate(problem=..., kernel=..., backend="cuda")
    """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections. Evaluations continue. Waiting tasks get a ``KqueueError``."""
        await asyncio.to_thread(self._transport.close)

    async def submit(
        self, request: Request | None = None, *, allow_idle_lane: bool = False, **fields: Unpack[Fields]
    ) -> AsyncTicket:
        """Submit one evaluation. :meth:`Client.submit` documents arguments and errors."""
        return (await self.submit_batch([_one(request, fields)], allow_idle_lane=allow_idle_lane))[0]

    async def submit_batch(self, entries: Iterable[Entry], *, allow_idle_lane: bool = False) -> list[AsyncTicket]:
        """Submit all entries or none, in one transaction, and return tickets in the order of ``entries``."""
        accepted = await asyncio.to_thread(self._transport.submit, all_valid(check_each(entries)), allow_idle_lane)
        return [AsyncTicket(one.evaluation_id, one.created, self._transport) for one in accepted]

    async def submit_each(
        self, entries: Iterable[Entry], *, allow_idle_lane: bool = False
    ) -> list[AsyncTicket | InvalidRequest]:
        """Submit every valid entry. The result of a refused entry is its error, which is not raised."""
        results = await asyncio.to_thread(self._transport.submit_each, check_each(entries), allow_idle_lane)
        return _tickets(AsyncTicket, results, self._transport)

    async def evaluate(
        self, request: Request | None = None, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Verdict:
        """Submit one evaluation and wait for its verdict. :meth:`Client.evaluate` documents arguments and errors."""
        return await (await self.submit(request, **options)).wait(timeout)

    async def evaluate_batch(
        self, entries: Iterable[Entry], *, timeout: float | None = None, allow_idle_lane: bool = False
    ) -> list[Verdict | InvalidRequest]:
        """Submit every valid entry, wait, and return the verdicts in the order of ``entries``."""
        results = await self.submit_each(entries, allow_idle_lane=allow_idle_lane)
        verdicts = iter(await self.wait_all([one for one in results if isinstance(one, AsyncTicket)], timeout))
        return [next(verdicts) if isinstance(one, AsyncTicket) else one for one in results]

    async def get(self, evaluation_id: UUID | str) -> AsyncTicket:
        """Return a ticket for an existing evaluation of any producer, or raise UnknownEvaluation."""
        identity = _id_of(evaluation_id)
        await self.verdict(identity)
        return AsyncTicket(identity, False, self._transport)

    async def batch(self, name: str) -> list[AsyncTicket]:
        """Return tickets for all evaluations of a batch in the order of submission, or none for an unknown batch."""
        identities = await asyncio.to_thread(self._transport.batch, name)
        return [AsyncTicket(identity, False, self._transport) for identity in identities]

    async def verdict(self, evaluation_id: UUID | str) -> Verdict | None:
        """Return an evaluation's verdict, or None if it has none yet. Raise UnknownEvaluation for an unknown id."""
        return await asyncio.to_thread(self._transport.verdict, _id_of(evaluation_id))

    async def cancel(self, evaluation_id: UUID | str) -> bool:
        """Cancel an evaluation, and kill it if it runs. Return False if it already had its verdict."""
        return await asyncio.to_thread(self._transport.cancel, _id_of(evaluation_id))

    async def wait_all(self, tickets: Iterable[AsyncTicket], timeout: float | None = None) -> list[Verdict]:
        """Wait for the verdicts of all tickets, and return them in order, or raise WaitTimeout."""
        return await _await_all(self._transport, [ticket.evaluation_id for ticket in tickets], timeout)

    async def as_completed(
        self, tickets: Iterable[AsyncTicket], timeout: float | None = None
    ) -> AsyncIterator[tuple[AsyncTicket, Verdict]]:
        """Yield each ticket with its verdict, in the order in which the verdicts come."""
        pending = {asyncio.wrap_future(self._transport.watch(ticket.evaluation_id)): ticket for ticket in tickets}
        ids = [ticket.evaluation_id for ticket in pending.values()]
        deadline = Deadline(timeout)
        with _cancelled(pending):
            while pending:
                done, _ = await asyncio.wait(pending, timeout=deadline.left_s(), return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    raise _too_late(len(pending), ids, timeout)
                for future in done:
                    yield pending.pop(future), future.result()


def _tickets(
    kind: Callable[[UUID, bool, Transport], _T], results: Iterable[Accepted | InvalidRequest], transport: Transport
) -> list[_T | InvalidRequest]:
    """Return a ticket for each accepted evaluation, and the errors unchanged."""
    return [kind(one.evaluation_id, one.created, transport) if isinstance(one, Accepted) else one for one in results]


class Deadline:
    """A timeout that several waits share, in seconds from its creation. None is no limit."""

    def __init__(self, timeout: float | None) -> None:
        self._at = None if timeout is None else time.monotonic() + timeout

    def left_s(self) -> float | None:
        """Return the remaining seconds, or None for no limit."""
        return None if self._at is None else max(0.0, self._at - time.monotonic())


@contextmanager
def _cancelled(futures: Iterable[Future[Verdict] | asyncio.Future[Verdict]]) -> Generator[None]:
    """Cancel the futures that are pending at the end of the block."""
    try:
        yield
    finally:
        for future in futures:
            future.cancel()


def _wait_all(transport: Transport, ids: Sequence[UUID], timeout: float | None) -> list[Verdict]:
    """Wait for the verdicts of all ``ids``, and return them in order. Raise WaitTimeout after ``timeout`` seconds."""
    futures = [transport.watch(identity) for identity in ids]
    with _cancelled(futures):
        if pending := wait(futures, timeout).not_done:
            raise _too_late(len(pending), ids, timeout)
        return [future.result() for future in futures]


async def _await_all(transport: Transport, ids: Sequence[UUID], timeout: float | None) -> list[Verdict]:
    """Wait like :func:`_wait_all`, in asyncio."""
    futures = [asyncio.wrap_future(transport.watch(identity)) for identity in ids]
    with _cancelled(futures):
        if futures and (pending := (await asyncio.wait(futures, timeout=timeout))[1]):
            raise _too_late(len(pending), ids, timeout)
        return [future.result() for future in futures]


def _too_late(missing: int, ids: Sequence[UUID], timeout: float | None) -> WaitTimeout:
    """Return the error of a wait for ``ids`` in which ``missing`` verdicts did not come within ``timeout`` seconds."""
    subject = f"the verdict of {ids[0]}" if len(ids) == 1 else f"{missing} of {len(ids)} verdicts"
    return WaitTimeout(
        f"{subject} did not come within {timeout} s: wait again or cancel, because the evaluations continue", ids
    )


def _one(request: Request | None, fields: Fields) -> Request:
    """Return the request that was given as a whole or by its fields. Raise InvalidRequest for both at once."""
    if unknown := fields.keys() - Fields.__optional_keys__:
        raise TypeError(f"unexpected keyword arguments: {', '.join(sorted(unknown))}")
    given = {name: value for name, value in fields.items() if value is not None}
    if request is not None and (given.keys() - {"lane"} or given.get("lane", "auto") != "auto"):
        raise InvalidRequest("request: give a Request or its fields, not both")
    return check(given if request is None else request)


def _id_of(evaluation_id: UUID | str) -> UUID:
    """Return an evaluation's id, or raise UnknownEvaluation for text that is not an id."""
    if isinstance(evaluation_id, UUID):
        return evaluation_id
    try:
        return UUID(evaluation_id)
    except (ValueError, AttributeError, TypeError):
        raise UnknownEvaluation(evaluation_id) from None
