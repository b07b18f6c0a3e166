"""The clients over HTTP, for producers that have a URL and a token instead of the database's credentials.

::

    with RemoteClient("http://fleet:18188", token="kq_...") as kq:
        verdict = kq.evaluate(problem=REFERENCE, kernel=SOURCE, backend="triton")

They are :class:`~kqueue.Client` and :class:`~kqueue.AsyncClient` on another transport. Every submission carries an
idempotency key, which the client creates if its producer gave none. A submission whose answer was lost is sent again
and never evaluated twice. A wait continues through restarts of the server.

One thread with an event loop sends the requests of all callers. A few requests serve any number of waits for verdicts.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar
from uuid import UUID

from kqueue.client.interfaces import AsyncClient, Client
from kqueue.client.server import Server
from kqueue.client.transport import Accepted, Transport
from kqueue.config import load
from kqueue.contract import Request, Verdict
from kqueue.errors import ConfigError, InvalidRequest, KqueueError, ServerUnavailable, UnknownEvaluation

_T = TypeVar("_T")
#: Number of evaluations in one page of a list.
_PAGE: Final = 1000
#: Maximum number of concurrent requests for verdicts. Each burst of new waits gets one until this limit is reached.
_POLLS: Final = 32
#: Seconds for which the server holds one request for verdicts.
_POLL_S: Final = 30.0
#: Maximum number of ids in one request.
_POLL_IDS: Final = 1000
#: Seconds within which new waits share a request.
_BURST_S: Final = 0.005


class _OverHttp:
    """A client of `kqueue serve`."""

    def __init__(self, url: str | None = None, *, token: str | None = None, retry_s: float = 60.0) -> None:
        """Create a client, which connects at its first use.

        Args:
            url: ``http://host:18188``, or ``unix:///path`` of a server's unix socket. By default ``KQUEUE_URL``, or
                the unix socket of the fleet that ``kqueue up`` runs on this machine.
            token: by default ``KQUEUE_TOKEN``, or the token of the fleet on this machine if ``url`` is that fleet's.
                On the unix socket the server's own user needs none.
            retry_s: seconds for which a request is repeated while the server cannot be reached or has no room. Then
                ``ServerUnavailable`` is raised. Waits for verdicts end only with their own timeouts.

        Raises:
            ConfigError: no server is known, ``url`` is neither an HTTP URL nor a unix socket's, or ``token`` is
                malformed.
        """
        self._transport: Transport = _HttpTransport(url, token, retry_s)


class RemoteClient(_OverHttp, Client):
    """:class:`Client` over HTTP, with the same methods, verdicts and exceptions."""


class AsyncRemoteClient(_OverHttp, AsyncClient):
    """:class:`AsyncClient` over HTTP, with the same methods, verdicts and exceptions."""


class _HttpTransport(Transport):
    """The transport to a fleet behind `kqueue serve`. :class:`RemoteClient` documents the arguments."""

    def __init__(self, url: str | None, token: str | None, retry_s: float) -> None:
        super().__init__()
        config = load(url=url, token=token)
        if config.url is None:
            raise ConfigError(
                "no server is known: pass its URL, set KQUEUE_URL, or start a fleet on this machine with `kqueue up` "
                f"(none that serves HTTP runs under {config.home_path})"
            )
        # Only the event loop uses these two.
        self._server = Server(config.url, config.token, retry_s=retry_s, connections=_POLLS)
        self._polling = _Polling(self._server)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def submit(self, requests: Sequence[Request], allow_idle_lane: bool) -> list[Accepted]:
        return self._run(self._server.submit, requests, allow_idle_lane)

    def submit_each(
        self, entries: Sequence[Request | InvalidRequest], allow_idle_lane: bool
    ) -> list[Accepted | InvalidRequest]:
        return self._run(self._server.submit_each, entries, allow_idle_lane)

    def batch(self, name: str) -> list[UUID]:
        ids: list[UUID] = []
        query: dict[str, Any] = {"batch": name, "limit": _PAGE}
        while True:
            page = self._run(self._server.ask, "GET", "/v1/evaluations", query=query)
            ids += [UUID(line["evaluation_id"]) for line in page["evaluations"]]
            if page["cursor"] is None:
                return ids[::-1]
            query["cursor"] = page["cursor"]

    def verdict(self, evaluation_id: UUID) -> Verdict | None:
        return next(iter(self._run(self._server.verdicts, [evaluation_id], 0)), None)

    def cancel(self, evaluation_id: UUID) -> bool:
        return self._run(self._server.cancel, evaluation_id)

    def watch(self, evaluation_id: UUID) -> Future[Verdict]:
        def remove(done: Future[Verdict]) -> None:
            with suppress(RuntimeError):  # The client was closed in the meantime.
                loop.call_soon_threadsafe(self._polling.remove, evaluation_id, done)

        future: Future[Verdict] = Future()
        with self._started() as loop:
            loop.call_soon_threadsafe(self._polling.add, evaluation_id, future)
        future.add_done_callback(remove)
        return future

    def close(self) -> None:
        if self._begin_close() and self._loop is not None and self._thread is not None:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop)
            self._thread.join()
            self._loop.close()

    @contextmanager
    def _started(self) -> Generator[asyncio.AbstractEventLoop]:
        """Yield the running loop. The block holds the lock until its work is scheduled, so that closing waits."""
        self._check()  # in a forked process the lock can be held for ever
        with self._lock:
            self._check()
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="kqueue-remote", daemon=True)
                self._thread.start()
            yield self._loop

    async def _end(self) -> None:
        """Fail all pending requests and waits, and end the thread."""
        mine = asyncio.current_task()
        for task in asyncio.all_tasks() - {mine}:
            task.cancel()
        await asyncio.gather(*(asyncio.all_tasks() - {mine}), return_exceptions=True)
        self._polling.fail(KqueueError("the client was closed"))
        await self._server.close()
        asyncio.get_running_loop().stop()

    def _run(self, work: Callable[..., Coroutine[Any, Any, _T]], *args: Any, **kwargs: Any) -> _T:
        """Return the result of a method of the server, which runs in the event loop."""
        with self._started() as loop:
            future = asyncio.run_coroutine_threadsafe(work(*args, **kwargs), loop)
        try:
            return future.result()
        except CancelledError:
            raise KqueueError("the client was closed") from None
        finally:
            future.cancel()


class _Polling:
    """The waits for verdicts of one server. All methods must run in one event loop."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._waits: dict[UUID, list[Future[Verdict]]] = {}
        self._unasked: set[UUID] = set()
        self._polls: set[asyncio.Task[None]] = set()

    def add(self, evaluation_id: UUID, future: Future[Verdict]) -> None:
        """Set ``future`` to the evaluation's verdict when it comes, or to the error that prevents it."""
        self._waits.setdefault(evaluation_id, []).append(future)
        self._unasked.add(evaluation_id)
        asyncio.get_running_loop().call_later(_BURST_S, self._poll)

    def remove(self, evaluation_id: UUID, future: Future[Verdict]) -> None:
        """Remove a future that is done or cancelled."""
        if waits := [one for one in self._waits.pop(evaluation_id, []) if one is not future]:
            self._waits[evaluation_id] = waits

    def fail(self, error: KqueueError) -> None:
        """End all waits with an error."""
        for evaluation_id in list(self._waits):
            self._settle(evaluation_id, error)

    def _settle(self, evaluation_id: UUID, outcome: Verdict | KqueueError) -> None:
        for future in self._waits.pop(evaluation_id, []):
            if future.set_running_or_notify_cancel():
                if isinstance(outcome, Verdict):
                    future.set_result(outcome)
                else:
                    future.set_exception(outcome)

    def _poll(self) -> None:
        """Request the verdicts that no active request covers."""
        self._unasked &= self._waits.keys()
        while self._unasked and len(self._polls) < _POLLS:
            ids = [self._unasked.pop() for _ in range(min(_POLL_IDS, len(self._unasked)))]
            task = asyncio.get_running_loop().create_task(self._ask(ids))
            self._polls.add(task)
            task.add_done_callback(self._answered)

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._polls.discard(task)
        if not task.cancelled():
            self._poll()

    async def _ask(self, ids: Sequence[UUID]) -> None:
        body = {"evaluation_ids": [str(identity) for identity in ids], "timeout": _POLL_S}
        try:
            answer = await self._server.ask("POST", "/v1/evaluations/wait", body=body, patient=True)
            for fields in answer["verdicts"]:
                verdict = Verdict.load(fields)
                self._settle(verdict.evaluation_id, verdict)
            for unknown in answer["unknown"]:
                self._settle(UUID(unknown), UnknownEvaluation(unknown))
        except (KqueueError, ValueError, LookupError, TypeError, AttributeError) as error:
            if not isinstance(error, KqueueError):
                error = ServerUnavailable(f"{self._server.url} does not answer like a kqueue server: {error}")
            for identity in ids:
                self._settle(identity, error)
        finally:
            self._unasked |= self._waits.keys() & set(ids)
