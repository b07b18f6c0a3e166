"""The part that all routes share: one client, threads for database reads, limits, and waits."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Annotated, Any, Concatenate, Final, ParamSpec, TypeVar
from uuid import UUID

from fastapi import Depends, Request
from sqlalchemy import Engine
from starlette.requests import ClientDisconnect

from kqueue import contract, receipts, upper_limits
from kqueue.client import AsyncClient, AsyncTicket
from kqueue.client.database import DatabaseTransport
from kqueue.config import Config
from kqueue.contract import Verdict
from kqueue.errors import DatabaseUnavailable, InvalidRequest, UnknownEvaluation, UnknownProblem
from kqueue.http.access import is_about
from kqueue.http.failures import HttpError
from kqueue.registry import features
from kqueue.states import Priority
from kqueue.store import audit, evaluations, reports, schema, tokens
from kqueue.store.audit import Action
from kqueue.store.engine import FLEET, Viewer, acting, connect
from kqueue.store.listener import Listener
from kqueue.store.models import LOCAL
from kqueue.store.readable import PAGES
from kqueue.text import one_line

_APPLICATION: Final = "kqueue-http"
#: Number of threads that read from the database, each with a connection, and of threads that look up tokens.
_READERS: Final = 8
_PORTERS: Final = 2
#: Number of threads in which the client submits and cancels: at most the number of its connections.
_SUBMITTERS: Final = 7
#: Maximum seconds of a read of the fleet's state.
_LOOK_S: Final = 2.0
#: Seconds to wait for further verdicts after the first, so that one answer returns them all.
_GATHER_S: Final = 0.02
_SOON: Final = {"Retry-After": "1"}
#: Maximum number of entries of the audit log that are remembered, to write none of them twice.
_REMEMBERED: Final = 10_000
#: Seconds between two look-ups of a credential while an answer to its holder lasts.
_LOOK_AGAIN_S: Final = 1.0
#: Detail of the error for a credential that is not valid.
ENDED: Final = "the token is unknown, expired or revoked"

_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request.

    ``name`` is the token's, or a description of a caller without a token. ``priority`` is the highest that the caller
    can request. ``owner`` is the owner of the caller's work. ``restricted`` is the view to which a header restricts the
    request (:mod:`kqueue.http.auth`). ``limits`` are upper limits (:mod:`kqueue.upper_limits`). ``credential`` has the
    arguments of :meth:`Gateway.identify`, or is None for a caller without a token or session.
    """

    name: str
    scopes: tuple[tokens.Scope, ...]
    token_id: UUID | None = None
    priority: Priority = Priority.INTERACTIVE
    owner: str = LOCAL
    restricted: Viewer | None = None
    limits: Mapping[str, float] = field(default_factory=dict, compare=False)
    credential: tuple[Callable[[Engine, str], tokens.Known | None], str] | None = field(
        default=None, compare=False, repr=False
    )

    @property
    def viewer(self) -> Viewer:
        """The caller's view of the database."""
        return self.within(tokens.Scope.READ_ALL)

    def within(self, wide: tokens.Scope) -> Viewer:
        """Return the view that ends at the caller's own work, unless it has the scope ``wide``."""
        if self.restricted is not None:
            return replace(self.restricted, owner=self.owner)
        return Viewer(self.owner, held=not self.may(wide))

    def may(self, scope: tokens.Scope) -> bool:
        """Return True if one of the caller's scopes covers ``scope``."""
        return any(own.covers(scope) for own in self.scopes)


class _Client(AsyncClient):
    """A client whose transactions act for the request's caller."""

    def __init__(self, config: Config) -> None:
        self._transport = DatabaseTransport(config, fenced=True)


class _Threads:
    """A few threads that query the database, each with a connection."""

    def __init__(self, url: str, name: str, number: int) -> None:
        self.engine = connect(url, application=f"{_APPLICATION}-{name}", pool_size=number, fenced=True)
        self._pool = ThreadPoolExecutor(number, thread_name_prefix=name)

    async def run(self, query: Callable[Concatenate[Engine, _P], _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call ``query(engine, ...)`` in one of the threads and return its result."""
        # The request's context has its caller, and makes the thread's log lines carry the request's id.
        call = partial(copy_context().run, query, self.engine, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    def close(self) -> None:
        """Shut down the threads without waiting for queries that run."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.engine.dispose()


class Gateway:
    """A fleet for the routes. The server calls :meth:`open` and :meth:`close` in its event loop."""

    def __init__(self, config: Config, *, streams: int, stream_s: float) -> None:
        self.config = config
        self.stream_s = stream_s
        self._most_streams = streams
        self.client = _Client(config)
        #: Set when the server stops. Waiting requests then answer at once.
        self.stopping = asyncio.Event()
        url = config.require_database()
        self._readers = _Threads(url, "read", _READERS)
        # Separate threads, so that neither token look-ups nor health reads wait for long queries of the readers.
        self._porters = _Threads(url, "who", _PORTERS)
        self._health = _Threads(url, "health", 1)
        self._listener = Listener(url, self._readers.engine, application=_APPLICATION)
        self._submitting: Counter[UUID] = Counter()
        self._streams: Counter[UUID | None] = Counter()
        self._noted: dict[tuple[object, ...], float] = {}
        self._limits = upper_limits.of_scopes(config.http_limits)
        self._holders: Counter[str] = Counter()
        self._endings: dict[str, asyncio.Task[None]] = {}

    async def open(self) -> None:
        """Check the database's schema."""
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_SUBMITTERS, thread_name_prefix="submit"))
        with acting(FLEET):
            await self.read(schema.check)

    async def close(self) -> None:
        """Close all connections and threads."""
        self.stopping.set()
        await self.client.close()
        await asyncio.to_thread(self._listener.close)
        for threads in (self._readers, self._porters, self._health):
            threads.close()

    async def read(self, query: Callable[Concatenate[Engine, _P], _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call ``query(engine, ...)``, a function of :mod:`kqueue.store`, in a thread for reads. Return its result.

        It acts for the request's caller.
        """
        return await self._readers.run(query, *args, **kwargs)

    async def identify(self, find: Callable[[Engine, str], tokens.Known | None], secret: str) -> Caller | None:
        """Return the caller with this secret, or None.

        ``find`` is :func:`kqueue.store.tokens.find` or :func:`kqueue.store.sessions.find`.
        """
        token = await self.admit(find, secret)
        if token is None:
            return None
        scopes = ("*", *sorted(token.scopes, key=list(tokens.Scope).index))
        limits = {path: most for scope in scopes for path, most in self._limits.get(scope, {}).items()}
        who = (token.name, token.scopes, token.id, token.priority, token.owner)
        return Caller(*who, limits={**limits, **token.limits}, credential=(find, secret))

    async def admit(self, query: Callable[Concatenate[Engine, _P], _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Read or change tokens and sessions, before the caller is known. It waits for no other request's query."""
        with acting(FLEET):
            return await self._porters.run(query, *args, **kwargs)

    async def look(self, query: Callable[Concatenate[Engine, _P], _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Read the state of the fleet on a separate thread and connection, in at most two seconds."""
        try:
            with acting(FLEET):
                async with asyncio.timeout(_LOOK_S):
                    return await self._health.run(query, *args, **kwargs)
        except TimeoutError:
            raise DatabaseUnavailable(f"Postgres did not answer within {_LOOK_S} s: try again") from None

    async def receipt(self, evaluation_id: UUID, *, sources: bool = False) -> bytes | None:
        """Return the signed receipt of an evaluation, or None if it has no verdict. Raise HttpError without a key."""
        detail = await self.read(reports.show, evaluation_id)
        if not (keys := receipts.load_keys(self.config.receipt_key)):
            raise HttpError(409, "this server signs no receipts: set KQUEUE_RECEIPT_KEY there", code="no_receipt_key")
        return None if detail.verdict is None else receipts.issue(keys[0], detail, detail.verdict, sources=sources)

    def bound(self, number: int) -> None:
        """Raise an HttpError 413 for too many evaluations in one request, before any of them is validated."""
        limit = self.config.http_max_batch
        if number > limit:
            raise HttpError(413, f"{number} evaluations in one request: at most {limit} (KQUEUE_HTTP_MAX_BATCH)")

    async def submit(
        self, caller: Caller, requests: Sequence[contract.Request], *, allow_idle_lane: bool = False
    ) -> list[AsyncTicket]:
        """Submit all requests or none, in one transaction.

        Raise an HttpError 403 if a problem is new and the caller can only name stored ones, and 429 if the caller has
        too many evaluations without a verdict. Raise InvalidRequest if a request is wrong, or its priority exceeds the
        caller's.
        """
        async with self._admitted(caller, len(requests)):
            try:
                tickets = await self.client.submit_batch(
                    [self._allowed(caller, request) for request in requests], allow_idle_lane=allow_idle_lane
                )
            except UnknownProblem as error:
                given = next((request for request in requests if request.problem_hash in error.hashes), None)
                raise _unknown(given, error) from None
            await self._attribute(caller, tickets)
        return tickets

    async def submit_each(
        self, caller: Caller, entries: Sequence[contract.Request | InvalidRequest], *, allow_idle_lane: bool = False
    ) -> list[AsyncTicket | InvalidRequest | HttpError]:
        """Submit every valid entry. The result of a refused entry is its error, which is not raised.

        Raise an HttpError 429 if the caller has too many evaluations without a verdict.
        """
        permitted: list[contract.Request | InvalidRequest] = []
        for entry in entries:
            try:
                permitted.append(self._allowed(caller, entry) if isinstance(entry, contract.Request) else entry)
            except InvalidRequest as error:
                permitted.append(error)
        async with self._admitted(caller, len(entries)):
            results = await self.client.submit_each(permitted, allow_idle_lane=allow_idle_lane)
            await self._attribute(caller, [result for result in results if not isinstance(result, InvalidRequest)])
        return [
            _unknown(entry, result)
            if isinstance(entry, contract.Request) and isinstance(result, UnknownProblem)
            else result
            for entry, result in zip(entries, results, strict=True)
        ]

    async def note(self, caller: Caller | None, action: Action, *subjects: object, every_s: float = 0) -> None:
        """Add to the audit log. The caller is None if it is unknown. An equal entry is not repeated for ``every_s``."""
        key, now = (caller, action, *subjects), time.monotonic()
        if now < self._noted.get(key, 0):
            return
        if every_s:
            if len(self._noted) >= _REMEMBERED:
                self._noted.clear()
            self._noted[key] = now + every_s
        name, owner, token_id = ("", None, None) if caller is None else (caller.name, caller.owner, caller.token_id)
        await self.admit(
            audit.record, action, *(one_line(str(one)) for one in subjects), actor=name, owner=owner, token_id=token_id
        )

    def _allowed(self, caller: Caller, request: contract.Request) -> contract.Request:
        """Return the request with its caller's limits applied, or raise InvalidRequest if it asks for more."""
        if request.priority is Priority.INTERACTIVE and caller.priority is not Priority.INTERACTIVE:
            raise InvalidRequest(f"priority: this token can request {caller.priority} at most")
        sends = self.config.callback_secret is not None and "callbacks" in features()
        if not sends and (request.callback_url or request.batch_callback_url):
            raise InvalidRequest("callback_url: the server needs KQUEUE_CALLBACK_SECRET and the feature callbacks")
        request = upper_limits.apply(request, caller.limits)
        update = {} if caller.token_id is None else {"producer": f"token:{caller.token_id}"}
        # Without the scope `problems`, a source can only refer to a stored problem.
        if not caller.may(tokens.Scope.PROBLEMS) and not request.names_problem:
            update["problem"] = request.problem_name
        return request.model_copy(update=update)

    async def cancel(self, caller: Caller, evaluation_id: UUID) -> bool:
        """Cancel an evaluation. Return False if it had its verdict.

        Raise UnknownEvaluation if the caller sees no evaluation with this id, and an HttpError 403 if the caller sees
        it, and cannot cancel the work of other owners.
        """
        wide = tokens.Scope.CANCEL_ALL
        widest = caller.within(wide)
        for viewer in [widest] if widest.held else [replace(widest, held=True), widest]:
            with suppress(UnknownEvaluation), acting(viewer):
                cancelled = await self.client.cancel(evaluation_id)
                if cancelled:
                    await self.note(caller, "cancel", evaluation_id)
                    if not viewer.held:
                        await self.note(caller, "scope", f"{wide}: {evaluation_id}")
                return cancelled
        if not await self.read(evaluations.existing, [evaluation_id]):
            raise UnknownEvaluation(evaluation_id)
        raise HttpError.insufficient_scope(wide, f"it belongs to another owner: this needs a token of the scope {wide}")

    @asynccontextmanager
    async def _admitted(self, caller: Caller, number: int) -> AsyncGenerator[None]:
        """Reserve room for ``number`` more evaluations of a caller's token. A caller without a token has no limit."""
        token_id = caller.token_id
        if token_id is None:
            yield
            return
        # Submissions of the token's concurrent requests count too.
        self._submitting[token_id] += number
        try:
            open_now = await self.read(tokens.unfinished, token_id)
            limit = self.config.http_max_queued
            if open_now + self._submitting[token_id] > limit:
                raise HttpError(
                    429, f"{open_now} evaluations of this token have no verdict yet: the limit is {limit} at once"
                )
            yield
        finally:
            self._submitting[token_id] -= number

    async def _attribute(self, caller: Caller, tickets: Iterable[AsyncTicket]) -> None:
        """Record the token that submitted evaluations, and add the evaluations to the access log."""
        tickets = list(tickets)
        is_about(ticket.evaluation_id for ticket in tickets)
        if caller.token_id is not None:
            await self.read(tokens.attribute, caller.token_id, [ticket.evaluation_id for ticket in tickets])

    def follow(
        self, caller: Caller, events: Callable[[AsyncGenerator[None]], AsyncGenerator[bytes]], *, every_s: float
    ) -> AsyncGenerator[bytes]:
        """Return events, counted as one of the caller's streams while they last. Raise an HttpError 429 at the limit.

        ``events`` looks for events at each item of its argument, which comes every ``every_s`` seconds. The items end
        with the caller's credential, the time of a stream, and the server.
        """
        if self._streams[caller.token_id] >= self._most_streams:
            raise HttpError(
                429,
                f"{self._most_streams} streams of events are open, which is the limit: close one",
                code="too_many_streams",
            )

        async def counted() -> AsyncGenerator[bytes]:
            self._streams[caller.token_id] += 1
            try:
                async with self.held(caller) as ended, aclosing(events(self._looks(ended, every_s))) as stream:
                    async for event in stream:
                        yield event
            finally:
                self._streams[caller.token_id] -= 1

        return counted()

    async def _looks(self, ended: asyncio.Task[None], every_s: float) -> AsyncGenerator[None]:
        ends_at = time.monotonic() + self.stream_s
        while not (self.stopping.is_set() or ended.done()) and time.monotonic() < ends_at:
            yield
            with suppress(TimeoutError):
                await asyncio.wait_for(self.stopping.wait(), every_s)

    async def pages(
        self, caller: Caller, report: Callable[..., Any], **arguments: Any
    ) -> AsyncGenerator[Sequence[Any]]:
        """Yield a long list in pages. Raise an HttpError 401 at the end of the caller's credential."""
        (ordered, most), after = PAGES[report], None
        async with self.held(caller) as ended:
            while rows := await self.read(report, after=after, limit=most, **arguments):
                if ended.done():
                    raise HttpError(401, ENDED)
                yield rows
                after = attrgetter(*ordered)(rows[-1])

    @asynccontextmanager
    async def held(self, caller: Caller) -> AsyncGenerator[asyncio.Task[None]]:
        """Yield a task that ends with the caller's credential. All answers of one credential share the look-ups."""
        key = "" if caller.credential is None else caller.credential[1]
        if key not in self._endings:
            self._endings[key] = asyncio.create_task(self._until_ended(caller))
        self._holders[key] += 1
        try:
            yield self._endings[key]
        finally:
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self._endings.pop(key).cancel()

    async def _until_ended(self, caller: Caller) -> None:
        while True:
            await asyncio.sleep(_LOOK_AGAIN_S)
            # While the database cannot be used, nothing is known about the credential.
            with suppress(DatabaseUnavailable):
                if caller.credential is not None and await self.identify(*caller.credential) is None:
                    return

    async def wait(self, request: Request, evaluation_id: UUID, timeout: float | None) -> Verdict | None:
        """Return an evaluation's verdict, or None if it does not come within ``timeout`` seconds.

        Raise an HttpError 503 if the server stops, and ClientDisconnect if the client has closed its connection. The
        evaluation continues then.
        """
        return (await self.wait_any(request, [evaluation_id], timeout)).get(evaluation_id)

    async def wait_any(self, request: Request, ids: Collection[UUID], timeout: float | None) -> dict[UUID, Verdict]:
        """Wait for the first verdict of several evaluations, and return all verdicts that exist by then.

        Raise UnknownEvaluation if the caller sees no evaluation with one of these ids, and an HttpError 401 when the
        caller's credential ends.
        """
        known = await self.read(evaluations.existing, ids)
        for identity in ids:
            if identity not in known:
                raise UnknownEvaluation(identity)
        is_about(ids)
        futures = {asyncio.wrap_future(self._listener.watch(identity)): identity for identity in ids}
        stopping = asyncio.create_task(self.stopping.wait())
        gone = asyncio.create_task(_gone(request))
        try:
            async with self.held(request.state.caller) as ended:
                waited = {*futures, stopping, gone, ended}
                await asyncio.wait(waited, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise HttpError(401, ENDED)
            if len(futures) > 1:
                await asyncio.sleep(_GATHER_S)
            verdicts = {identity: future.result() for future, identity in futures.items() if future.done()}
            if verdicts:
                return verdicts
            if gone.done():
                raise ClientDisconnect
            if stopping.done():
                raise HttpError(503, "the server is being restarted: try again", code="stopping", headers=_SOON)
            return {}
        finally:
            for future in (*futures, stopping, gone):
                future.cancel()


async def _gone(request: Request) -> None:
    """Wait until the client closes its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _unknown(given: contract.Request | None, error: UnknownProblem) -> HttpError | UnknownProblem:
    """Return the error for an unknown problem: 403 for a missing scope if the caller sent the source."""
    if given is None or given.names_problem or given.problem_hash not in error.hashes:
        return error
    wanted = tokens.Scope.PROBLEMS
    return HttpError.insufficient_scope(
        wanted,
        f"the problem is new, and this token can only name stored ones: this needs a token of the scope {wanted}",
    )


def current(request: Request) -> Gateway:
    """Return the gateway. Routes depend on this function."""
    return request.app.state.gateway


CurrentGateway = Annotated[Gateway, Depends(current)]
