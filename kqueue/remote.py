"""The clients over HTTP, for producers that have a URL and a token instead of the database's credentials.

::

    with RemoteClient("http://fleet:18188", token="kq_...") as kq:
        verdict = kq.evaluate(problem=REFERENCE, kernel=SOURCE, backend="triton")

They are :class:`~kqueue.Client` and :class:`~kqueue.AsyncClient` in all but how they reach the fleet. Every
submission carries an idempotency key, made here where its producer gave none: one whose answer was lost is
sent again and never evaluated twice. Who waits waits on through restarts of the server. Needs the extra
``http``.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, Final, TypeVar, cast
from uuid import UUID, uuid4

from pydantic import SecretStr

from kqueue.client import Accepted, AsyncClient, Client, Core
from kqueue.config import load
from kqueue.contract import Request, Verdict
from kqueue.errors import (
    AccessRefused,
    BrokerUnavailable,
    ConfigError,
    DatabaseUnavailable,
    IdempotencyConflict,
    InvalidRequest,
    KqueueError,
    LaneUnavailable,
    SchemaMismatch,
    ServerUnavailable,
    UnknownEvaluation,
    UnknownLane,
    UnknownProblem,
)

try:
    import httpx
except ImportError as missing:
    raise ConfigError("clients over HTTP need httpx: `pip install 'kqueue[http]'`") from missing

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

#: Answers after which the same is asked again: no room, and a server or a proxy that cannot now.
_AGAIN: Final = frozenset({429, 502, 503, 504})
#: The first pause before something is asked again, doubled each time, and the longest.
_PAUSE_S: Final = (0.1, 5.0)
#: How long the server may hold one question for verdicts, and how many ids are in one.
_POLL_S: Final = 30.0
_POLL_IDS: Final = 1000
#: Questions for verdicts at once: one for each burst of submissions, until their ids go together in the next.
_POLLS: Final = 32
#: What goes into one request where a submission may be taken apart: entries, and characters of source.
_CHUNK: Final = (200, 4 << 20)
_PAGE: Final = 1000
_OWN_KEYS: Final = "remote-"

#: What the server's codes stand for; each takes the error's detail.
_ERRORS: Final[dict[str, type[KqueueError]]] = {
    "lane_unavailable": LaneUnavailable,
    "unknown_lane": UnknownLane,
    "invalid_request": InvalidRequest,
    "malformed_request": InvalidRequest,
    "too_large": InvalidRequest,
    "unauthenticated": AccessRefused,
    "forbidden": AccessRefused,
    "database_unavailable": DatabaseUnavailable,
    "broker_unavailable": BrokerUnavailable,
    "schema_mismatch": SchemaMismatch,
    "too_many_queued": ServerUnavailable,
    "stopping": ServerUnavailable,
}


class RemoteClient(Client):
    """:class:`~kqueue.Client` over HTTP: the same methods, verdicts and exceptions."""

    def __init__(self, url: str | None = None, *, token: str | None = None, retry_s: float = 60.0) -> None:
        """Name a server; nothing is opened before it is needed.

        Args:
            url: ``http://host:18188``; by default ``KQUEUE_URL``, or that of the fleet that ``kqueue up`` runs
                on this machine.
            token: by default ``KQUEUE_TOKEN``; a server on loopback may need none.
            retry_s: how long a server that cannot be reached or has no room is asked again before
                ``ServerUnavailable`` is raised. Waiting for verdicts ends with its own timeout only.

        Raises:
            ConfigError: no server is known, or ``url`` is not one of HTTP.
        """
        self._core = _Remote(url, token, retry_s)


class AsyncRemoteClient(AsyncClient):
    """:class:`~kqueue.AsyncClient` over HTTP: the same methods, verdicts and exceptions."""

    def __init__(self, url: str | None = None, *, token: str | None = None, retry_s: float = 60.0) -> None:
        """As :class:`RemoteClient`."""
        self._core = _Remote(url, token, retry_s)


class _Remote(Core):
    """A fleet behind `kqueue serve`. One thread with an event loop asks and waits for everybody."""

    def __init__(self, url: str | None, token: str | None, retry_s: float) -> None:
        config = load(url=url, token=token)
        if config.url is None:
            raise ConfigError("no server is known: give its URL, or set KQUEUE_URL")
        self._url = _checked_url(config.url)
        self._headers = {} if config.token is None else {"Authorization": f"Bearer {_checked_token(config.token)}"}
        self._retry_s = retry_s
        self._lock = threading.Lock()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        # What follows belongs to the loop.
        self._http: httpx.AsyncClient
        self._waiters: dict[UUID, list[Future[Verdict]]] = {}
        self._unasked: set[UUID] = set()
        self._polls: set[asyncio.Task[None]] = set()

    def submit(self, requests: Sequence[Request], allow_idle_lane: bool) -> list[Accepted]:
        if not requests:
            return []
        requests = [_keyed(request) for request in requests]
        path = "/v1/evaluations" if len(requests) == 1 else "/v1/evaluations/batch"
        entries = [_entry(request) for request in requests]
        body = entries[0] if len(entries) == 1 else {"entries": entries}
        answer = self._run(self._ask("POST", path, body=body, query={"allow_idle_lane": allow_idle_lane}))
        accepted = [answer] if len(entries) == 1 else answer["evaluations"]
        return [_accepted(request, one) for request, one in zip(requests, accepted, strict=True)]

    def submit_each(
        self, slots: Sequence[Request | InvalidRequest], allow_idle_lane: bool
    ) -> list[Accepted | InvalidRequest]:
        good = [_keyed(slot) for slot in slots if isinstance(slot, Request)]
        settled: list[Accepted | InvalidRequest] = []
        for chunk in _chunks(good):
            body = {"entries": [_entry(request) for request in chunk]}
            answer = self._run(
                self._ask("POST", "/v1/evaluations/each", body=body, query={"allow_idle_lane": allow_idle_lane})
            )
            settled += [_settled(request, slot) for request, slot in zip(chunk, answer["results"], strict=True)]
        rest = iter(settled)
        return [next(rest) if isinstance(slot, Request) else slot for slot in slots]

    def existing(self, evaluation_id: UUID) -> UUID:
        self.verdict(evaluation_id)
        return evaluation_id

    def batch(self, name: str) -> list[UUID]:
        found: list[UUID] = []
        cursor: dict[str, str] = {}
        while True:
            query = {"batch": name, "limit": _PAGE, **cursor}
            page = self._run(self._ask("GET", "/v1/evaluations", query=query))
            found += [UUID(line["evaluation_id"]) for line in page["evaluations"]]
            if page["cursor"] is None:
                return found[::-1]
            cursor = {"cursor": page["cursor"]}

    def verdict(self, evaluation_id: UUID) -> Verdict | None:
        body = {"evaluation_ids": [str(evaluation_id)], "timeout": 0}
        answer = self._run(self._ask("POST", "/v1/evaluations/wait", body=body))
        if answer["unknown"]:
            raise UnknownEvaluation(evaluation_id)
        return _verdict(answer["verdicts"][0]) if answer["verdicts"] else None

    def cancel(self, evaluation_id: UUID) -> bool:
        return self._run(self._ask("POST", f"/v1/evaluations/{evaluation_id}/cancel"))["cancelled"]

    def watch(self, evaluation_id: UUID) -> Future[Verdict]:
        future: Future[Verdict] = Future()
        loop = self._started()
        future.add_done_callback(lambda done: _call(loop, self._forget, evaluation_id, done))
        _call(loop, self._await, evaluation_id, future)
        return future

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            loop, thread = self._loop, self._thread
        if loop is not None and thread is not None:
            asyncio.run_coroutine_threadsafe(self._end(), loop)
            thread.join()

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._closed:
                raise KqueueError("the client is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._serve, name="kqueue-remote", daemon=True)
                self._thread.start()
            return self._loop

    def _serve(self) -> None:
        assert self._loop is not None
        asyncio.set_event_loop(self._loop)
        self._http = httpx.AsyncClient(
            base_url=self._url,
            headers=self._headers,
            timeout=httpx.Timeout(60.0, connect=10.0, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=_POLLS),
        )
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _end(self) -> None:
        """Fail all that is under way, and end the thread."""
        mine = asyncio.current_task()
        for task in asyncio.all_tasks() - {mine}:
            task.cancel()
        await asyncio.gather(*(asyncio.all_tasks() - {mine}), return_exceptions=True)
        for identity in list(self._waiters):
            self._settle(identity, KqueueError("the client was closed"))
        await self._http.aclose()
        asyncio.get_running_loop().stop()

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """What ``work`` comes to in the loop, for the thread that asks."""
        try:
            loop = self._started()
        except KqueueError:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            return future.result()
        except CancelledError:
            raise KqueueError("the client was closed") from None
        finally:
            future.cancel()

    async def _ask(
        self, method: str, path: str, *, body: Any = None, query: Mapping[str, Any] = {}, patient: bool = False
    ) -> Any:
        """The JSON that the server answers, asked for again while it cannot.

        Args:
            method: of HTTP.
            path: below the server's URL.
            body: sent as JSON.
            query: the URL's parameters.
            patient: ask for ever.
        """
        began, pause = time.monotonic(), _PAUSE_S[0]
        while True:
            wait_s = 0.0
            try:
                answer = await self._http.request(method, path, params=query, json=body)
            except httpx.RequestError as fault:
                error: KqueueError = ServerUnavailable(
                    f"{self._url} cannot be reached ({str(fault) or type(fault).__name__}): check the address, and "
                    "that `kqueue serve` runs there"
                )
            else:
                if answer.is_success:
                    return _json(answer)
                error = _error(answer)
                if answer.status_code not in _AGAIN:
                    raise error
                wait_s = _retry_after_s(answer)
            if not patient and time.monotonic() - began > self._retry_s:
                raise error
            _log.debug("asked again in a moment: %s", error)
            await asyncio.sleep(max(wait_s, pause) * random.uniform(0.5, 1.0))  # noqa: S311 no secret
            pause = min(2 * pause, _PAUSE_S[1])

    def _await(self, evaluation_id: UUID, future: Future[Verdict]) -> None:
        self._waiters.setdefault(evaluation_id, []).append(future)
        self._unasked.add(evaluation_id)
        # Those that come in one go are asked for in one.
        asyncio.get_running_loop().call_later(0.005, self._poll)

    def _forget(self, evaluation_id: UUID, future: Future[Verdict]) -> None:
        waiting = self._waiters.get(evaluation_id, [])
        if future in waiting:
            waiting.remove(future)
        if not waiting:
            self._waiters.pop(evaluation_id, None)

    def _settle(self, evaluation_id: UUID, outcome: Verdict | KqueueError) -> None:
        for future in self._waiters.pop(evaluation_id, []):
            if future.set_running_or_notify_cancel():
                if isinstance(outcome, Verdict):
                    future.set_result(outcome)
                else:
                    future.set_exception(outcome)

    def _poll(self) -> None:
        """Ask for what nobody asks for yet."""
        self._unasked &= self._waiters.keys()
        while self._unasked and len(self._polls) < _POLLS:
            ids = [self._unasked.pop() for _ in range(min(_POLL_IDS, len(self._unasked)))]
            task = asyncio.get_running_loop().create_task(self._poll_for(ids))
            self._polls.add(task)
            task.add_done_callback(self._polled)

    def _polled(self, task: asyncio.Task[None]) -> None:
        self._polls.discard(task)
        if not task.cancelled():
            self._poll()

    async def _poll_for(self, ids: Sequence[UUID]) -> None:
        body = {"evaluation_ids": [str(identity) for identity in ids], "timeout": _POLL_S}
        try:
            answer = await self._ask("POST", "/v1/evaluations/wait", body=body, patient=True)
            for raw in answer["verdicts"]:
                verdict = _verdict(raw)
                self._settle(verdict.evaluation_id, verdict)
            for unknown in answer["unknown"]:
                self._settle(UUID(unknown), UnknownEvaluation(unknown))
        except KqueueError as error:
            for identity in ids:
                self._settle(identity, error)
        except (ValueError, KeyError) as error:
            for identity in ids:
                self._settle(identity, ServerUnavailable(f"{self._url} answers otherwise than kqueue does: {error}"))
        finally:
            self._unasked |= self._waiters.keys() & set(ids)


def _call(loop: asyncio.AbstractEventLoop, function: Any, *arguments: Any) -> None:
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        # The client was closed meanwhile.
        if not loop.is_closed():
            raise


def _checked_url(url: str) -> str:
    """A server's URL without a slash at its end.

    Raises:
        ConfigError: it is none of HTTP.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.scheme not in {"http", "https"} or not parsed.host or (parsed.port or 0) > 65535:
        raise ConfigError("KQUEUE_URL: not one of HTTP; use http://host:18188")
    return url.rstrip("/")


def _checked_token(token: SecretStr) -> str:
    """A token that a header can hold.

    Raises:
        ConfigError: it is none.
    """
    secret = token.get_secret_value().strip()
    if not secret.isascii() or not secret.isprintable() or " " in secret:
        raise ConfigError("KQUEUE_TOKEN: not one that `kqueue token create` printed; it begins with kq_")
    return secret


def _keyed(request: Request) -> Request:
    """With an idempotency key in any case, so that it may be sent twice."""
    if request.idempotency_key is not None:
        return request
    return request.model_copy(update={"idempotency_key": f"{_OWN_KEYS}{uuid4().hex}"})


def _entry(request: Request) -> dict[str, Any]:
    """What is sent: what its producer said and nothing that has a default, so that the server's count."""
    return request.model_dump(mode="json", exclude_unset=True)


def _accepted(request: Request, answer: Mapping[str, Any]) -> Accepted:
    # Under a key that was made here nobody else submits: what is known was sent by a try that was not answered.
    own = (request.idempotency_key or "").startswith(_OWN_KEYS)
    return Accepted(UUID(answer["evaluation_id"]), own or answer["created"])


def _settled(request: Request, slot: Mapping[str, Any]) -> Accepted | InvalidRequest:
    if slot["error"] is None:
        return _accepted(request, slot["evaluation"])
    error = _of_problem(slot["error"])
    if not isinstance(error, InvalidRequest):
        raise error
    return error


def _verdict(raw: Mapping[str, Any]) -> Verdict:
    """A verdict without the derived facts beside it, and what a newer server may add."""
    return Verdict.model_validate({name: raw[name] for name in Verdict.model_fields if name in raw})


def _chunks(requests: Iterable[Request]) -> Iterable[list[Request]]:
    chunk: list[Request] = []
    size = 0
    for request in requests:
        length = len(request.problem) + len(request.kernel)
        if chunk and (len(chunk) == _CHUNK[0] or size + length > _CHUNK[1]):
            yield chunk
            chunk, size = [], 0
        chunk.append(request)
        size += length
    if chunk:
        yield chunk


def _json(answer: httpx.Response) -> Any:
    """What a successful answer says.

    Raises:
        ServerUnavailable: nothing, as no kqueue answered.
    """
    try:
        said = answer.json()
    except ValueError:
        raise _stranger(answer) from None
    if not isinstance(said, dict):
        raise _stranger(answer)
    return cast("dict[str, Any]", said)


def _error(answer: httpx.Response) -> KqueueError:
    """What an answer that is no success stands for."""
    try:
        return _of_problem(answer.json())
    except (ValueError, KeyError, TypeError, AttributeError):
        return _stranger(answer)


def _stranger(answer: httpx.Response) -> ServerUnavailable:
    return ServerUnavailable(
        f"{answer.request.url} answers {answer.status_code} and nothing that kqueue would: check the address"
    )


def _retry_after_s(answer: httpx.Response) -> float:
    """Seconds after which the server is to be asked again, half a minute at most; 0 where it names none."""
    try:
        return min(float(int(answer.headers.get("Retry-After", 0))), 30.0)
    except ValueError:
        # A date, as proxies may give.
        return 0.0


def _of_problem(problem: Mapping[str, Any]) -> KqueueError:
    code, detail = problem["code"], problem["detail"]
    if code == "idempotency_conflict":
        return IdempotencyConflict(problem["keys"])
    if code == "unknown_problem":
        return UnknownProblem(problem["problem_hashes"])
    if code == "unknown_evaluation":
        error = UnknownEvaluation("")
        error.args = (detail,)
        return error
    return _ERRORS.get(code, KqueueError)(detail)
