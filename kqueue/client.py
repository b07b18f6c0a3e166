"""Submitting evaluations and waiting for their verdicts, from scripts, trainers and services.

::

    with Client() as kq:
        verdict = kq.evaluate(problem=REFERENCE, kernel=SOURCE, backend="triton")

A request is refused, with :class:`~kqueue.errors.InvalidRequest`, before anything is written. What is
accepted lies in Postgres and ends in one verdict whatever happens to Redis, a worker or this process. A
failed kernel is never an exception. A client may be shared by threads, but not be carried through a fork.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple, Protocol, Self
from uuid import UUID

from celery import Celery
from pydantic import SecretStr

from kqueue import broker
from kqueue.broker import check_lane
from kqueue.config import Config, load
from kqueue.contract import CPU_BACKENDS, Backend, Request, Settings, Verdict, parse_request
from kqueue.errors import (
    BrokerUnavailable,
    DatabaseUnavailable,
    IdempotencyConflict,
    InvalidRequest,
    KqueueError,
    LaneUnavailable,
    UnknownEvaluation,
    UnknownProblem,
    WaitTimeout,
)
from kqueue.store import evaluations, schema, workers
from kqueue.store.engine import connect
from kqueue.store.listener import Listener

_log = logging.getLogger(__name__)

#: A request in full, or its fields by name.
Entry = Request | Mapping[str, Any]

_APPLICATION: Final = "kqueue-client"
#: Messages sent between two notes in the database that they were.
_MARK_EVERY: Final = 500


class Accepted(NamedTuple):
    """An evaluation that will end in one verdict, and whether this submission made it."""

    evaluation_id: UUID
    created: bool


class Core(Protocol):
    """How a client reaches its fleet. Every method blocks but :meth:`watch`, and may be called by any thread."""

    def submit(self, requests: Sequence[Request], allow_idle_lane: bool) -> list[Accepted]:
        """Accept all or none."""
        ...

    def submit_each(
        self, slots: Sequence[Request | InvalidRequest], allow_idle_lane: bool
    ) -> list[Accepted | InvalidRequest]:
        """Accept what can be accepted; the rest stays in its place as what is wrong with it."""
        ...

    def existing(self, evaluation_id: UUID) -> UUID:
        """The same id, or UnknownEvaluation."""
        ...

    def batch(self, name: str) -> list[UUID]:
        """A batch's evaluations, in the order of their submission."""
        ...

    def verdict(self, evaluation_id: UUID) -> Verdict | None:
        """The verdict, None while there is none, or UnknownEvaluation."""
        ...

    def cancel(self, evaluation_id: UUID) -> bool:
        """Whether it was ended, or UnknownEvaluation."""
        ...

    def watch(self, evaluation_id: UUID) -> Future[Verdict]:
        """The verdict when it comes; cancelled by who stops waiting."""
        ...

    def close(self) -> None:
        """Let go of everything; futures that wait fail."""
        ...


@dataclass(frozen=True, slots=True)
class Ticket:
    """A handle on an accepted evaluation. It may be dropped: the evaluation goes on, and :meth:`Client.get` finds it.

    Attributes:
        evaluation_id: its id.
        created: False where an earlier submission, or another process, made it.
    """

    evaluation_id: UUID
    created: bool = field(compare=False)
    _core: Core = field(repr=False, compare=False)

    def wait(self, timeout: float | None = None) -> Verdict:
        """The verdict, as soon as there is one.

        Args:
            timeout: seconds; None for ever.

        Raises:
            WaitTimeout: it did not come in time; the evaluation goes on.
        """
        return _wait_all(self._core, [self.evaluation_id], timeout)[0]

    def verdict(self) -> Verdict | None:
        """The verdict; None while there is none."""
        return self._core.verdict(self.evaluation_id)

    def done(self) -> bool:
        """Whether there is a verdict."""
        return self.verdict() is not None

    def cancel(self) -> bool:
        """End the evaluation as ``cancelled`` and kill it where it runs; False if it had its verdict already."""
        return self._core.cancel(self.evaluation_id)


@dataclass(frozen=True, slots=True)
class AsyncTicket:
    """:class:`Ticket` for asyncio.

    Attributes:
        evaluation_id: its id.
        created: False where an earlier submission, or another process, made it.
    """

    evaluation_id: UUID
    created: bool = field(compare=False)
    _core: Core = field(repr=False, compare=False)

    async def wait(self, timeout: float | None = None) -> Verdict:
        """As :meth:`Ticket.wait`."""
        return (await _await_all(self._core, [self.evaluation_id], timeout))[0]

    async def verdict(self) -> Verdict | None:
        """As :meth:`Ticket.verdict`."""
        return await asyncio.to_thread(self._core.verdict, self.evaluation_id)

    async def done(self) -> bool:
        """As :meth:`Ticket.done`."""
        return await self.verdict() is not None

    async def cancel(self) -> bool:
        """As :meth:`Ticket.cancel`."""
        return await asyncio.to_thread(self._core.cancel, self.evaluation_id)


class Client:
    """A producer's connection to a fleet.

    ::

        with Client() as kq:
            ticket = kq.submit(problem=..., kernel=..., backend="cuda", lane="gpu")
            verdict = ticket.wait(timeout=60)
    """

    def __init__(
        self, config: Config | None = None, *, database_url: str | None = None, redis_url: str | None = None
    ) -> None:
        """Connect to a fleet; nothing is opened before it is needed.

        Args:
            config: all settings; by default the environment's (:func:`kqueue.config.load`), which also
                finds a fleet started on this machine with ``kqueue up``.
            database_url: Postgres, instead of the configured one.
            redis_url: Redis, instead of the configured one.

        Raises:
            ConfigError: no database is known.
        """
        self._core: Core = _Core(config, database_url=database_url, redis_url=redis_url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all connections. Evaluations go on; threads that wait here get a ``KqueueError``."""
        self._core.close()

    def submit(
        self,
        request: Request | None = None,
        *,
        problem: str | None = None,
        kernel: str | None = None,
        backend: Backend | str | None = None,
        lane: str = "auto",
        settings: Settings | Mapping[str, Any] | None = None,
        problem_label: str | None = None,
        kernel_label: str | None = None,
        batch: str | None = None,
        idempotency_key: str | None = None,
        queue_wait_s: float | None = None,
        allow_idle_lane: bool = False,
    ) -> Ticket:
        """Submit one evaluation, as a :class:`Request` or by its fields.

        Args:
            request: the whole request; the other arguments but ``allow_idle_lane`` are not given then.
            problem: source of the reference; or ``sha256:`` and the hash of the source, for a stored problem.
            kernel: source of the candidate.
            backend: what the kernel is written in: ``cuda``, ``triton``, ``torch``, ``cpp``, ``cupy``.
            lane: ``auto`` (``gpu`` where a GPU worker lives, else ``cpu``), ``cpu``, ``gpu`` or
                ``gpu.<model>``.
            settings: how it is judged.
            problem_label: a name for people.
            kernel_label: a name for people.
            batch: a name under which evaluations are found again.
            idempotency_key: the same key again gives the same evaluation.
            queue_wait_s: seconds that it may wait for a worker before it ends as ``expired``.
            allow_idle_lane: accept a lane (not ``auto``) that no live worker serves now.

        Raises:
            InvalidRequest: a field is wrong; the message names it and the fix.
            LaneUnavailable: no live worker serves the lane.
            UnknownProblem: no stored problem has the hash that ``problem`` names.
            DatabaseUnavailable: Postgres cannot be used.
            SchemaMismatch: the database is of another version of kqueue.
        """
        entry = _entry(
            request,
            problem=problem,
            kernel=kernel,
            backend=backend,
            lane=lane,
            settings=settings,
            problem_label=problem_label,
            kernel_label=kernel_label,
            batch=batch,
            idempotency_key=idempotency_key,
            queue_wait_s=queue_wait_s,
        )
        return self._ticket(self._core.submit([_request(entry)], allow_idle_lane)[0])

    def submit_batch(self, entries: Iterable[Entry], *, allow_idle_lane: bool = False) -> list[Ticket]:
        """Submit all or none, in one transaction; tickets come in the order of ``entries``.

        Raises:
            InvalidRequest: an entry is wrong; the message gives its number, from 0.
            LaneUnavailable: as :meth:`submit`. So are ``DatabaseUnavailable`` and ``SchemaMismatch``.
        """
        return [self._ticket(s) for s in self._core.submit(_requests(entries), allow_idle_lane)]

    def submit_each(self, entries: Iterable[Entry], *, allow_idle_lane: bool = False) -> list[Ticket | InvalidRequest]:
        """Submit everything that can be judged; tickets come in the order of ``entries``.

        In the place of an entry that is refused stands the :class:`InvalidRequest` (not raised).

        Raises:
            DatabaseUnavailable: Postgres cannot be used. Nothing was submitted.
            SchemaMismatch: the database is of another version of kqueue.
        """
        slots = self._core.submit_each(_checked(entries), allow_idle_lane)
        return [slot if isinstance(slot, InvalidRequest) else self._ticket(slot) for slot in slots]

    def evaluate(self, request: Request | None = None, *, timeout: float | None = None, **fields: Any) -> Verdict:
        """Submit one evaluation and wait for its verdict; arguments and errors as :meth:`submit`.

        Args:
            request: the whole request.
            timeout: seconds from submission; None for ever.
            fields: as :meth:`submit`'s.

        Raises:
            WaitTimeout: the verdict did not come in time; ``evaluation_ids`` names the evaluation.
        """
        return self.submit(request, **fields).wait(timeout)

    def evaluate_batch(
        self, entries: Iterable[Entry], *, timeout: float | None = None, allow_idle_lane: bool = False
    ) -> list[Verdict | InvalidRequest]:
        """Submit everything that can be judged, wait for all of it, and return it in the order of ``entries``.

        One bad entry never spoils the rest: in the place of an entry that is refused stands the
        :class:`InvalidRequest` (not raised), in every other place a verdict.

        Args:
            entries: requests, or mappings of their fields.
            timeout: seconds from submission; None for ever.
            allow_idle_lane: as :meth:`submit`'s.

        Raises:
            WaitTimeout: a verdict did not come in time; ``evaluation_ids`` names what was submitted, and
                :meth:`verdict` has what came.
        """
        slots = self._core.submit_each(_checked(entries), allow_idle_lane)
        found = iter(_wait_all(self._core, [s.evaluation_id for s in slots if isinstance(s, Accepted)], timeout))
        return [slot if isinstance(slot, InvalidRequest) else next(found) for slot in slots]

    def get(self, evaluation_id: UUID | str) -> Ticket:
        """A ticket for an evaluation submitted before, by whomever.

        Raises:
            UnknownEvaluation: no evaluation has this id.
        """
        return self._ticket_of(self._core.existing(_identity(evaluation_id)))

    def batch(self, name: str) -> list[Ticket]:
        """Tickets for all that was submitted under a batch's name, by whomever, in the order of submission.

        A producer that crashed finds its work again. Nothing under that name: an empty list.
        """
        return [self._ticket_of(identity) for identity in self._core.batch(name)]

    def verdict(self, evaluation_id: UUID | str) -> Verdict | None:
        """An evaluation's verdict; None while it has none.

        Raises:
            UnknownEvaluation: no evaluation has this id.
        """
        return self._core.verdict(_identity(evaluation_id))

    def cancel(self, evaluation_id: UUID | str) -> bool:
        """As :meth:`Ticket.cancel`.

        Raises:
            UnknownEvaluation: no evaluation has this id.
        """
        return self._core.cancel(_identity(evaluation_id))

    def wait_all(self, tickets: Iterable[Ticket], timeout: float | None = None) -> list[Verdict]:
        """The verdicts of all tickets, in their order.

        Raises:
            WaitTimeout: one did not come in time.
        """
        return _wait_all(self._core, [ticket.evaluation_id for ticket in tickets], timeout)

    def as_completed(self, tickets: Iterable[Ticket], timeout: float | None = None) -> Iterator[tuple[Ticket, Verdict]]:
        """Each ticket with its verdict, as they come.

        Raises:
            WaitTimeout: not all came within ``timeout`` seconds from now.
        """
        pending = {self._core.watch(ticket.evaluation_id): ticket for ticket in tickets}
        everything = [ticket.evaluation_id for ticket in pending.values()]
        deadline = _deadline(timeout)
        try:
            while pending:
                done, _ = wait(pending, _left(deadline), FIRST_COMPLETED)
                if not done:
                    raise _too_late(len(pending), everything, timeout)
                for future in done:
                    yield pending.pop(future), future.result()
        finally:
            for future in pending:
                future.cancel()

    def _ticket(self, submitted: Accepted) -> Ticket:
        return Ticket(*submitted, self._core)

    def _ticket_of(self, evaluation_id: UUID) -> Ticket:
        return Ticket(evaluation_id, created=False, _core=self._core)


class AsyncClient:
    """:class:`Client` for asyncio: the same methods as coroutines. Any number may wait at once.

    ::

        async with AsyncClient() as kq:
            verdict = await kq.evaluate(problem=..., kernel=..., backend="cuda")
    """

    def __init__(
        self, config: Config | None = None, *, database_url: str | None = None, redis_url: str | None = None
    ) -> None:
        """As :class:`Client`."""
        self._core: Core = _Core(config, database_url=database_url, redis_url=redis_url)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """As :meth:`Client.close`."""
        await asyncio.to_thread(self._core.close)

    async def submit(
        self,
        request: Request | None = None,
        *,
        problem: str | None = None,
        kernel: str | None = None,
        backend: Backend | str | None = None,
        lane: str = "auto",
        settings: Settings | Mapping[str, Any] | None = None,
        problem_label: str | None = None,
        kernel_label: str | None = None,
        batch: str | None = None,
        idempotency_key: str | None = None,
        queue_wait_s: float | None = None,
        allow_idle_lane: bool = False,
    ) -> AsyncTicket:
        """As :meth:`Client.submit`."""
        entry = _entry(
            request,
            problem=problem,
            kernel=kernel,
            backend=backend,
            lane=lane,
            settings=settings,
            problem_label=problem_label,
            kernel_label=kernel_label,
            batch=batch,
            idempotency_key=idempotency_key,
            queue_wait_s=queue_wait_s,
        )
        return self._ticket((await asyncio.to_thread(self._core.submit, [_request(entry)], allow_idle_lane))[0])

    async def submit_batch(self, entries: Iterable[Entry], *, allow_idle_lane: bool = False) -> list[AsyncTicket]:
        """As :meth:`Client.submit_batch`."""
        submitted = await asyncio.to_thread(self._core.submit, _requests(entries), allow_idle_lane)
        return [self._ticket(s) for s in submitted]

    async def submit_each(
        self, entries: Iterable[Entry], *, allow_idle_lane: bool = False
    ) -> list[AsyncTicket | InvalidRequest]:
        """As :meth:`Client.submit_each`."""
        slots = await asyncio.to_thread(self._core.submit_each, _checked(entries), allow_idle_lane)
        return [slot if isinstance(slot, InvalidRequest) else self._ticket(slot) for slot in slots]

    async def evaluate(
        self,
        request: Request | None = None,
        *,
        timeout: float | None = None,
        **fields: Any,
    ) -> Verdict:
        """As :meth:`Client.evaluate`."""
        return await (await self.submit(request, **fields)).wait(timeout)

    async def evaluate_batch(
        self,
        entries: Iterable[Entry],
        *,
        timeout: float | None = None,
        allow_idle_lane: bool = False,
    ) -> list[Verdict | InvalidRequest]:
        """As :meth:`Client.evaluate_batch`."""
        slots = await asyncio.to_thread(self._core.submit_each, _checked(entries), allow_idle_lane)
        ids = [slot.evaluation_id for slot in slots if isinstance(slot, Accepted)]
        found = iter(await _await_all(self._core, ids, timeout))
        return [slot if isinstance(slot, InvalidRequest) else next(found) for slot in slots]

    async def get(self, evaluation_id: UUID | str) -> AsyncTicket:
        """As :meth:`Client.get`."""
        return self._ticket_of(await asyncio.to_thread(self._core.existing, _identity(evaluation_id)))

    async def batch(self, name: str) -> list[AsyncTicket]:
        """As :meth:`Client.batch`."""
        return [self._ticket_of(identity) for identity in await asyncio.to_thread(self._core.batch, name)]

    async def verdict(self, evaluation_id: UUID | str) -> Verdict | None:
        """As :meth:`Client.verdict`."""
        return await asyncio.to_thread(self._core.verdict, _identity(evaluation_id))

    async def cancel(self, evaluation_id: UUID | str) -> bool:
        """As :meth:`Client.cancel`."""
        return await asyncio.to_thread(self._core.cancel, _identity(evaluation_id))

    async def wait_all(
        self,
        tickets: Iterable[AsyncTicket],
        timeout: float | None = None,
    ) -> list[Verdict]:
        """As :meth:`Client.wait_all`."""
        return await _await_all(self._core, [ticket.evaluation_id for ticket in tickets], timeout)

    async def as_completed(
        self,
        tickets: Iterable[AsyncTicket],
        timeout: float | None = None,
    ) -> AsyncIterator[tuple[AsyncTicket, Verdict]]:
        """As :meth:`Client.as_completed`."""
        pending = {asyncio.wrap_future(self._core.watch(ticket.evaluation_id)): ticket for ticket in tickets}
        everything = [ticket.evaluation_id for ticket in pending.values()]
        deadline = _deadline(timeout)
        try:
            while pending:
                done, _ = await asyncio.wait(pending, timeout=_left(deadline), return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    raise _too_late(len(pending), everything, timeout)
                for future in done:
                    yield pending.pop(future), future.result()
        finally:
            for future in pending:
                future.cancel()

    def _ticket(self, submitted: Accepted) -> AsyncTicket:
        return AsyncTicket(*submitted, self._core)

    def _ticket_of(self, evaluation_id: UUID) -> AsyncTicket:
        return AsyncTicket(evaluation_id, created=False, _core=self._core)


class _Core:
    """A fleet's database and broker, reached directly."""

    def __init__(self, config: Config | None, *, database_url: str | None, redis_url: str | None) -> None:
        if config is None:
            config = load(database_url=database_url, redis_url=redis_url)
        else:
            given = {"database_url": database_url, "redis_url": redis_url}
            config = config.model_copy(update={k: SecretStr(v) for k, v in given.items() if v is not None})
        self._config = config
        url = config.require_database()
        self._engine = connect(url, application=_APPLICATION)
        self._listener = Listener(url, self._engine, application=_APPLICATION)
        self._lock = threading.Lock()
        self._checked = False
        self._closed = False

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._listener.close()
        self._engine.dispose()
        if "_app" in self.__dict__:
            self._app.close()

    @cached_property
    def _app(self) -> Celery:
        return broker.make_app(self._config)

    def _ready(self) -> None:
        """Once before the database is used."""
        with self._lock:
            if self._closed:
                raise KqueueError("the client is closed")
            if not self._checked:
                schema.check(self._engine)
                self._checked = True

    def submit(self, requests: Sequence[Request], allow_idle_lane: bool) -> list[Accepted]:
        self._ready()
        resolved = self._resolve(requests, allow_idle_lane)
        for place, request in enumerate(resolved):
            if isinstance(request, InvalidRequest):
                raise _at(place, request) if len(resolved) > 1 else request
        return self._accept([request for request in resolved if isinstance(request, Request)])

    def submit_each(
        self, slots: Sequence[Request | InvalidRequest], allow_idle_lane: bool
    ) -> list[Accepted | InvalidRequest]:
        self._ready()
        good = iter(self._resolve([slot for slot in slots if isinstance(slot, Request)], allow_idle_lane))
        slots = [next(good) if isinstance(slot, Request) else slot for slot in slots]
        while True:
            try:
                accepted = iter(self._accept([slot for slot in slots if isinstance(slot, Request)]))
            except IdempotencyConflict as conflict:
                slots = [
                    IdempotencyConflict([slot.idempotency_key])
                    if isinstance(slot, Request) and slot.idempotency_key in conflict.keys
                    else slot
                    for slot in slots
                ]
            except UnknownProblem as unknown:
                slots = [
                    UnknownProblem([slot.problem_hash])
                    if isinstance(slot, Request) and slot.problem_hash in unknown.hashes
                    else slot
                    for slot in slots
                ]
            else:
                return [next(accepted) if isinstance(slot, Request) else slot for slot in slots]

    def _resolve(self, requests: Sequence[Request], allow_idle_lane: bool) -> list[Request | InvalidRequest]:
        """Give each request its lane, or say why it has none."""
        if not requests:
            return []
        live = workers.live_lanes(self._engine, within_s=self._config.lease_s)
        resolved: list[Request | InvalidRequest] = []
        for request in requests:
            try:
                resolved.append(request.model_copy(update={"lane": _lane(request, live, allow_idle_lane)}))
            except InvalidRequest as error:
                resolved.append(error)
        return resolved

    def _accept(self, requests: Sequence[Request]) -> list[Accepted]:
        """Write evaluations and send their messages."""
        app = self._app
        submitted = evaluations.submit(self._engine, requests)
        new = [evaluation.message for evaluation in submitted if evaluation.created]
        try:
            for start in range(0, len(new), _MARK_EVERY):
                sent = new[start : start + _MARK_EVERY]
                broker.publish(app, sent)
                evaluations.mark_published(self._engine, [message.evaluation_id for message in sent])
        except (BrokerUnavailable, DatabaseUnavailable) as error:
            _log.warning("accepted evaluations wait for the fleet's sweeper to send them: %s", error)
        return [Accepted(evaluation.evaluation_id, evaluation.created) for evaluation in submitted]

    def existing(self, evaluation_id: UUID) -> UUID:
        self._ready()
        if not evaluations.existing(self._engine, [evaluation_id]):
            raise UnknownEvaluation(evaluation_id)
        return evaluation_id

    def batch(self, name: str) -> list[UUID]:
        self._ready()
        return evaluations.in_batch(self._engine, name)

    def verdict(self, evaluation_id: UUID) -> Verdict | None:
        self._ready()
        return evaluations.verdict(self._engine, evaluation_id)

    def cancel(self, evaluation_id: UUID) -> bool:
        self._ready()
        cancelled = evaluations.cancel(self._engine, evaluation_id)
        if cancelled:
            try:
                broker.revoke(self._app, evaluation_id)
            except KqueueError as error:
                _log.warning("%s is cancelled, but its worker could not be told to stop it: %s", evaluation_id, error)
        return cancelled

    def watch(self, evaluation_id: UUID) -> Future[Verdict]:
        return self._listener.watch(evaluation_id)


def _wait_all(core: Core, ids: Sequence[UUID], timeout: float | None) -> list[Verdict]:
    futures = [core.watch(identity) for identity in ids]
    try:
        _, pending = wait(futures, timeout)
        if pending:
            raise _too_late(len(pending), ids, timeout)
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


async def _await_all(core: Core, ids: Sequence[UUID], timeout: float | None) -> list[Verdict]:
    futures = [asyncio.wrap_future(core.watch(identity)) for identity in ids]
    try:
        if futures:
            _, pending = await asyncio.wait(futures, timeout=timeout)
            if pending:
                raise _too_late(len(pending), ids, timeout)
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


def _lane(request: Request, live: Mapping[str, int], allow_idle_lane: bool) -> str:
    """The lane that a request goes to.

    Raises:
        InvalidRequest: its kernel cannot be judged there.
        UnknownLane: there is no such lane.
        LaneUnavailable: no live worker serves it.
    """
    start = "start one with `kqueue up` or `kqueue worker`"
    on_cpu = request.backend in CPU_BACKENDS
    if request.lane == "auto":
        for lane in ("gpu", "cpu") if on_cpu else ("gpu",):
            if lane in live:
                return lane
        need = "gpu or cpu" if on_cpu else f"gpu, which a {request.backend} kernel needs"
        raise LaneUnavailable(f"lane: no live worker serves {need}; {start}")
    check_lane(request.lane)
    if request.lane == "cpu" and not on_cpu:
        raise InvalidRequest(f"backend: a {request.backend} kernel cannot be judged on the lane cpu; use the lane gpu")
    if request.lane not in live and not allow_idle_lane:
        served = ", ".join(f"{lane} ({number})" for lane, number in sorted(live.items())) or "none"
        raise LaneUnavailable(f"lane: no live worker serves {request.lane} (served now: {served}); {start}")
    return request.lane


def _entry(request: Request | None, **fields: Any) -> Entry:
    """A request given whole or by its fields."""
    given = {name: value for name, value in fields.items() if value is not None}
    if request is None:
        return given
    if given.keys() - {"lane"} or given.get("lane", "auto") != "auto":
        raise InvalidRequest("request: give a Request or its fields, not both")
    return request


def _request(entry: Entry) -> Request:
    """A checked request.

    Raises:
        InvalidRequest: a field is wrong.
    """
    if isinstance(entry, Request):
        return entry
    if not isinstance(entry, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidRequest(f"request: a kqueue.Request or a mapping of its fields is needed, not {type(entry)}")
    return parse_request(entry)


def _requests(entries: Iterable[Entry]) -> list[Request]:
    requests: list[Request] = []
    for place, entry in enumerate(entries):
        try:
            requests.append(_request(entry))
        except InvalidRequest as error:
            raise _at(place, error) from None
    return requests


def _checked(entries: Iterable[Entry]) -> list[Request | InvalidRequest]:
    slots: list[Request | InvalidRequest] = []
    for entry in entries:
        try:
            slots.append(_request(entry))
        except InvalidRequest as error:
            slots.append(error)
    return slots


def _at(place: int, error: InvalidRequest) -> InvalidRequest:
    """The same error, saying which entry of a batch it is about."""
    error.args = (f"entry {place}: {error}",)
    return error


def _identity(evaluation_id: UUID | str) -> UUID:
    if isinstance(evaluation_id, UUID):
        return evaluation_id
    try:
        return UUID(evaluation_id)
    except (ValueError, AttributeError, TypeError):
        raise UnknownEvaluation(evaluation_id) from None


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _too_late(missing: int, ids: Sequence[UUID], timeout: float | None) -> WaitTimeout:
    what = f"the verdict of {ids[0]}" if len(ids) == 1 else f"{missing} of {len(ids)} verdicts"
    return WaitTimeout(f"{what} did not come within {timeout} s; the evaluations go on, wait again or cancel", ids)
