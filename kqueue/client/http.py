"""The transport to `kqueue serve`. One thread with an event loop sends the requests of all callers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, Final
from uuid import UUID

from kqueue import tracing
from kqueue.client import wire
from kqueue.client.polling import POLLS, Polling
from kqueue.client.server import Server
from kqueue.client.transport import Accepted, Transport
from kqueue.config import load
from kqueue.contract import Request, Verdict
from kqueue.errors import ConfigError, InvalidRequest, KqueueError, UnknownEvaluation

#: Number of evaluations in one page of a list.
_PAGE: Final = 1000


class HttpTransport(Transport):
    """The transport to a fleet behind `kqueue serve`.

    Args:
        url: the server's URL, or None for the one of the environment or of the fleet on this machine.
        token: the token to send, or None for the one of the environment or of the fleet on this machine.
        retry_s: seconds for which a request is repeated while the server cannot answer.

    Raises:
        ConfigError: no server is known, or ``url`` or ``token`` is malformed.
    """

    def __init__(self, url: str | None, token: str | None, retry_s: float) -> None:
        config = load(url=url, token=token)
        if config.url is None:
            raise ConfigError(
                "no server is known: pass its URL, set KQUEUE_URL, or start a fleet on this machine with `kqueue up` "
                f"(none that serves HTTP runs under {config.home_path})"
            )
        # Only the event loop uses these two.
        self._server = Server(config.url, config.token, retry_s=retry_s, connections=POLLS)
        self._polling = Polling(self._server)
        self._lock = threading.Lock()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def submit(self, requests: Sequence[Request], allow_idle_lane: bool) -> list[Accepted]:
        if not requests:
            return []
        requests = [wire.with_key(request) for request in requests]
        path = "/v1/evaluations" if len(requests) == 1 else "/v1/evaluations/batch"
        entries = [wire.dump_request(request) for request in requests]
        body = entries[0] if len(entries) == 1 else {"entries": entries}
        answer = self._submit(path, body, len(entries), allow_idle_lane)
        accepted = [answer] if len(entries) == 1 else answer["evaluations"]
        return [wire.load_accepted(request, one) for request, one in zip(requests, accepted, strict=True)]

    def submit_each(
        self, entries: Sequence[Request | InvalidRequest], allow_idle_lane: bool
    ) -> list[Accepted | InvalidRequest]:
        good = [wire.with_key(entry) for entry in entries if isinstance(entry, Request)]
        results: list[Accepted | InvalidRequest] = []
        for chunk in wire.chunks(good):
            body = {"entries": [wire.dump_request(request) for request in chunk]}
            answer = self._submit("/v1/evaluations/each", body, len(chunk), allow_idle_lane)
            results += [wire.load_result(request, one) for request, one in zip(chunk, answer["results"], strict=True)]
        rest = iter(results)
        return [next(rest) if isinstance(entry, Request) else entry for entry in entries]

    def batch(self, name: str) -> list[UUID]:
        ids: list[UUID] = []
        cursor: dict[str, str] = {}
        while True:
            page = self._ask("GET", "/v1/evaluations", query={"batch": name, "limit": _PAGE, **cursor})
            ids += [UUID(line["evaluation_id"]) for line in page["evaluations"]]
            if page["cursor"] is None:
                return ids[::-1]
            cursor = {"cursor": page["cursor"]}

    def verdict(self, evaluation_id: UUID) -> Verdict | None:
        body = {"evaluation_ids": [str(evaluation_id)], "timeout": 0}
        answer = self._ask("POST", "/v1/evaluations/wait", body=body)
        if answer["unknown"]:
            raise UnknownEvaluation(evaluation_id)
        return Verdict.load(answer["verdicts"][0]) if answer["verdicts"] else None

    def cancel(self, evaluation_id: UUID) -> bool:
        return self._ask("POST", f"/v1/evaluations/{evaluation_id}/cancel")["cancelled"]

    def watch(self, evaluation_id: UUID) -> Future[Verdict]:
        future: Future[Verdict] = Future()
        with self._lock:
            loop = self._started()
            loop.call_soon_threadsafe(self._polling.add, evaluation_id, future)
        future.add_done_callback(lambda done: _call(loop, self._polling.remove, evaluation_id, done))
        return future

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._loop is not None:
                asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        if self._thread is not None:
            self._thread.join()

    def _started(self) -> asyncio.AbstractEventLoop:
        """Return the running loop. The caller holds the lock until its work is scheduled, so that closing waits."""
        if self._closed:
            raise KqueueError("the client is closed")
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_run, args=[self._loop], name="kqueue-remote", daemon=True)
            self._thread.start()
        return self._loop

    async def _end(self) -> None:
        """Fail all pending requests and waits, and end the thread."""
        mine = asyncio.current_task()
        for task in asyncio.all_tasks() - {mine}:
            task.cancel()
        await asyncio.gather(*(asyncio.all_tasks() - {mine}), return_exceptions=True)
        self._polling.fail(KqueueError("the client was closed"))
        await self._server.close()
        asyncio.get_running_loop().stop()

    def _submit(self, path: str, body: Any, count: int, allow_idle_lane: bool) -> dict[str, Any]:
        with tracing.submission(count) as traceparent:
            headers = {} if traceparent is None else {tracing.HEADER: traceparent}
            return self._ask("POST", path, body=body, query={"allow_idle_lane": allow_idle_lane}, headers=headers)

    def _ask(self, method: str, path: str, **parts: Any) -> dict[str, Any]:
        """Call :meth:`Server.ask` from the caller's thread."""
        with self._lock:
            loop = self._started()
            future = asyncio.run_coroutine_threadsafe(self._server.ask(method, path, **parts), loop)
        try:
            return future.result()
        except CancelledError:
            raise KqueueError("the client was closed") from None
        finally:
            future.cancel()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: Any) -> None:
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        # The client was closed in the meantime.
        if not loop.is_closed():
            raise
