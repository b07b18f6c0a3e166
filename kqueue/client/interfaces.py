"""The interfaces of clients, for threads and for asyncio, with their handles on accepted evaluations."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial, wraps
from inspect import getmembers, iscoroutinefunction
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypedDict, TypeVar, Unpack
from uuid import UUID

from kqueue import registry
from kqueue.client.transport import Accepted, Entry, Transport, all_valid, check, check_each
from kqueue.config import require_packages
from kqueue.contract import Request, Settings, Verdict
from kqueue.errors import InvalidRequest, UnknownEvaluation, WaitTimeout
from kqueue.states import Priority

if TYPE_CHECKING:
    from kqueue.config import Config
    from kqueue.features.duel.client import Duels as _Attached
else:
    _Attached = type("client", tuple(registry.attached("client")), {})

_P = ParamSpec("_P")
_T = TypeVar("_T")
_TicketT = TypeVar("_TicketT", bound=Accepted)
_Queue = tuple[Callable[["Future[Verdict]"], object], Callable[[float | None], Awaitable["Future[Verdict]"]]]


class Fields(TypedDict, total=False):
    """The fields of a :class:`Request`, which documents them. None stands for a field's default."""

    problem: str | None
    kernel: str | None
    trees: tuple[str, ...] | None
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
        return _run(_InThread(self._transport).wait_all([self], timeout))[0]

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
        return (await Methods[AsyncTicket](self._transport).wait_all([self], timeout))[0]

    async def verdict(self) -> Verdict | None:
        """Return the verdict, or None if there is none yet."""
        return await asyncio.to_thread(self._transport.verdict, self.evaluation_id)

    async def done(self) -> bool:
        """Return True if there is a verdict."""
        return await self.verdict() is not None

    async def cancel(self) -> bool:
        """Cancel the evaluation, and kill it if it runs. Return False if it already had its verdict."""
        return await asyncio.to_thread(self._transport.cancel, self.evaluation_id)


class Methods(_Attached, Generic[_TicketT]):
    """The methods of all clients."""

    _ticket: Callable[[UUID, bool, Transport], _TicketT]

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def _call(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return await asyncio.to_thread(work, *args, **kwargs)

    def _queue(self) -> _Queue:
        """Return a function that adds a future from any thread, and one that waits for the next, or a TimeoutError."""
        loop, futures = asyncio.get_running_loop(), asyncio.Queue[Future[Verdict]]()

        async def get(timeout: float | None) -> Future[Verdict]:
            async with asyncio.timeout(timeout):
                return await futures.get()

        return partial(loop.call_soon_threadsafe, futures.put_nowait), get

    async def close(self) -> None:
        """Close all connections. Evaluations continue. Waiting callers get a ``KqueueError``."""
        await self._call(self._transport.close)

    async def submit(
        self, request: Request | None = None, *, allow_idle_lane: bool = False, **fields: Unpack[Fields]
    ) -> _TicketT:
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
        return (await self.submit_batch([_one(request, fields)], allow_idle_lane=allow_idle_lane))[0]

    async def submit_batch(self, entries: Iterable[Entry], *, allow_idle_lane: bool = False) -> list[_TicketT]:
        """Submit all entries or none, in one transaction, and return tickets in the order of ``entries``.

        The errors are the ones of :meth:`submit`. The message of an ``InvalidRequest`` has the entry's index.
        """
        accepted = await self._call(self._transport.submit, all_valid(check_each(entries)), allow_idle_lane)
        return [self._ticket(one.evaluation_id, one.created, self._transport) for one in accepted]

    async def submit_each(
        self, entries: Iterable[Entry], *, allow_idle_lane: bool = False
    ) -> list[_TicketT | InvalidRequest]:
        """Submit every valid entry, and return a ticket for each in the order of ``entries``.

        Entries are requests, or mappings of their fields. For a refused entry the list contains the
        :class:`InvalidRequest`, which is not raised. After ``DatabaseUnavailable`` or ``SchemaMismatch`` nothing was
        submitted, except over HTTP: a :class:`RemoteClient` sends 200 entries at most in one request, and the entries
        of earlier requests are submitted. With idempotency keys all entries can be submitted again.
        """
        return [
            one if isinstance(one, InvalidRequest) else self._ticket(one.evaluation_id, one.created, self._transport)
            for one in await self._call(self._transport.submit_each, check_each(entries), allow_idle_lane)
        ]

    async def evaluate(
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
        Deadline(timeout)  # refuses a wrong one before submission
        return (await self.wait_all([await self.submit(request, **options)], timeout))[0]

    async def evaluate_batch(
        self, entries: Iterable[Entry], *, timeout: float | None = None, allow_idle_lane: bool = False
    ) -> list[Verdict | InvalidRequest]:
        """Submit every valid entry, wait, and return the verdicts in the order of ``entries``.

        :meth:`submit_each` documents the entries, and :meth:`evaluate` the timeout.

        Raises:
            WaitTimeout: a verdict did not come in time. ``evaluation_ids`` names all submitted evaluations, and
                :meth:`verdict` returns the verdicts that exist.
        """
        Deadline(timeout)  # refuses a wrong one before submission
        results = await self.submit_each(entries, allow_idle_lane=allow_idle_lane)
        verdicts = iter(await self.wait_all([one for one in results if not isinstance(one, InvalidRequest)], timeout))
        return [one if isinstance(one, InvalidRequest) else next(verdicts) for one in results]

    async def get(self, evaluation_id: UUID | str) -> _TicketT:
        """Return a ticket for an existing evaluation of any producer, or raise UnknownEvaluation."""
        identity = _id_of(evaluation_id)
        await self.verdict(identity)  # raises UnknownEvaluation
        return self._ticket(identity, False, self._transport)

    async def batch(self, name: str) -> list[_TicketT]:
        """Return tickets for all evaluations of a batch in the order of submission, or none for an unknown batch.

        A producer can use this after a crash to find its evaluations.
        """
        identities = await self._call(self._transport.batch, name)
        return [self._ticket(identity, False, self._transport) for identity in identities]

    async def verdict(self, evaluation_id: UUID | str) -> Verdict | None:
        """Return an evaluation's verdict, or None if it has none yet. Raise UnknownEvaluation for an unknown id."""
        return await self._call(self._transport.verdict, _id_of(evaluation_id))

    async def cancel(self, evaluation_id: UUID | str) -> bool:
        """Cancel an evaluation, and kill it if it runs. Return False if it already had its verdict.

        Raise UnknownEvaluation for an unknown id.
        """
        return await self._call(self._transport.cancel, _id_of(evaluation_id))

    async def wait_all(self, tickets: Iterable[_TicketT], timeout: float | None = None) -> list[Verdict]:
        """Wait for the verdicts of all tickets, and return them in order, or raise WaitTimeout."""
        tickets = [*tickets]
        found = {ticket.evaluation_id: verdict async for ticket, verdict in self.as_completed(tickets, timeout)}
        return [found[ticket.evaluation_id] for ticket in tickets]

    async def as_completed(
        self, tickets: Iterable[_TicketT], timeout: float | None = None
    ) -> AsyncGenerator[tuple[_TicketT, Verdict]]:
        """Yield each ticket with its verdict, in the order in which the verdicts come.

        Raises:
            WaitTimeout: a verdict did not come within ``timeout`` seconds from the call.
        """
        put, get = self._queue()
        deadline = Deadline(timeout)
        watched: dict[Future[Verdict], _TicketT] = {}
        try:
            for ticket in tickets:
                watched[future := self._transport.watch(ticket.evaluation_id)] = ticket
                future.add_done_callback(put)
            for missing in range(len(watched), 0, -1):
                try:
                    future = await get(deadline.left_s())
                except (TimeoutError, Empty):
                    ids = [ticket.evaluation_id for ticket in watched.values()]
                    late = f"the verdict of {ids[0]}" if len(ids) == 1 else f"{missing} of {len(ids)} verdicts"
                    advice = "wait again or cancel, because the evaluations continue"
                    raise WaitTimeout(f"{late} did not come within {timeout} s: {advice}", ids) from None
                yield watched[future], future.result()
        finally:
            for future in watched:
                future.cancel()


class _InThread(Methods[Ticket]):
    """The methods in the caller's thread, which they block. Without an event loop they never suspend."""

    _ticket = Ticket

    async def _call(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return work(*args, **kwargs)

    def _queue(self) -> _Queue:
        futures = SimpleQueue[Future[Verdict]]()

        async def get(timeout: float | None) -> Future[Verdict]:
            return futures.get(timeout=timeout)

        return futures.put, get


def _run(work: Awaitable[_T]) -> _T:
    """Return the result of a method of :class:`_InThread`."""
    try:
        next(work.__await__())
    except StopIteration as end:
        return end.value
    raise AssertionError(f"{work} is suspended")


def _blocking(method: Callable[Concatenate[Any, _P], Coroutine[Any, Any, _T]]) -> Callable[Concatenate[Any, _P], _T]:
    """Return a method of :class:`Client` that runs a method of :class:`Methods`."""

    @wraps(method)
    def blocking(self: Any, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return _run(method(_InThread(self._transport), *args, **kwargs))

    return blocking


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
            ConfigError: no database is set, or the extra ``database`` is not installed.
        """
        require_packages()
        # Clients over HTTP must load neither Celery nor SQLAlchemy.
        from kqueue.client.database import DatabaseTransport

        self._transport: Transport = DatabaseTransport(config, database_url=database_url, redis_url=redis_url)


class Client(_ToServices):
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

    close = _blocking(Methods[Ticket].close)
    submit = _blocking(Methods[Ticket].submit)
    submit_batch = _blocking(Methods[Ticket].submit_batch)
    submit_each = _blocking(Methods[Ticket].submit_each)
    evaluate = _blocking(Methods[Ticket].evaluate)
    evaluate_batch = _blocking(Methods[Ticket].evaluate_batch)
    get = _blocking(Methods[Ticket].get)
    batch = _blocking(Methods[Ticket].batch)
    verdict = _blocking(Methods[Ticket].verdict)
    cancel = _blocking(Methods[Ticket].cancel)
    wait_all = _blocking(Methods[Ticket].wait_all)
    if TYPE_CHECKING:
        duel = _blocking(Methods[Ticket].duel)

    def as_completed(self, tickets: Iterable[Ticket], timeout: float | None = None) -> Iterator[tuple[Ticket, Verdict]]:
        """Yield each ticket with its verdict, in the order in which the verdicts come."""
        coming = _InThread(self._transport).as_completed(tickets, timeout)
        try:
            while True:
                yield _run(anext(coming))
        except StopAsyncIteration:
            return
        finally:
            _run(coming.aclose())


for _name, _method in getmembers(_Attached, iscoroutinefunction):
    setattr(Client, _name, _blocking(_method))


class AsyncClient(_ToServices, Methods[AsyncTicket]):
    """:class:`Client` for asyncio, with coroutines as methods. Any number of them can wait at once.

    ::

        async with AsyncClient() as kq:
            verdict = await kq.evaluate(problem=..., kernel=..., backend="cuda")
    """

    _ticket = AsyncTicket

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Deadline:
    """A timeout that several waits share, in seconds from now. None, or more than threads can wait, is no limit."""

    def __init__(self, timeout: float | None) -> None:
        if timeout is not None and math.isnan(timeout):
            raise InvalidRequest("timeout: must be a number of seconds, or None for no limit, not NaN")
        self._at = None if timeout is None or timeout >= threading.TIMEOUT_MAX else time.monotonic() + timeout

    def left_s(self) -> float | None:
        """Return the remaining seconds, or None for no limit."""
        return None if self._at is None else max(0.0, self._at - time.monotonic())


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
