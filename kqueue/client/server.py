"""Requests to one `kqueue serve`, repeated while it cannot answer."""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, cast

from kqueue.client import wire
from kqueue.errors import AccessRefused, BudgetSpent, ConfigError, KqueueError, ServerUnavailable

if TYPE_CHECKING:
    from pydantic import SecretStr

#: Module of httpx's command line. It imports rich and pygments, which would take a third of a client's start-up time.
_COMMAND_LINE: Final = "httpx._main"
_modules = cast("dict[str, Any]", sys.modules)
_modules.setdefault(_COMMAND_LINE, None)
try:
    import httpx
except ImportError as missing:
    raise ConfigError("clients over HTTP need httpx: `pip install 'kqueue[http]'`") from missing
finally:
    if _modules[_COMMAND_LINE] is None:
        del _modules[_COMMAND_LINE]

_log = logging.getLogger(__name__)

#: Statuses after which a request is repeated: no room, or a server or proxy that cannot answer now.
_AGAIN: Final = frozenset({429, 502, 503, 504})
#: First and longest pause in seconds before a request is repeated. The pause doubles each time.
_PAUSE_S: Final = (0.1, 5.0)
#: Prefix of a unix socket's URL, before the socket's path.
_UNIX: Final = "unix://"
#: Longest pause in seconds that a server can request.
_LONGEST_WAIT_S: Final = 30.0


class Server(wire.Operations):
    """The HTTP interface of a server. All methods except the constructor must run in one event loop.

    ``url`` is ``http://host:18188`` or ``unix:///path``. A request is repeated for ``retry_s`` seconds before the error
    is raised, and ``connections`` connections are kept open. ``transport`` replaces the connection to ``url``, and
    :meth:`close` closes it. Raise ConfigError for another URL or a malformed token.
    """

    def __init__(
        self,
        url: str,
        token: SecretStr | None,
        *,
        retry_s: float,
        connections: int,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = _checked_url(url)
        self._headers = {} if token is None else {"Authorization": f"Bearer {_checked_token(token)}"}
        self._retry_s = retry_s
        self._connections = connections
        self._transport = transport
        self._http: httpx.AsyncClient | None = None

    async def ask(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: Mapping[str, Any] = {},
        headers: Mapping[str, str] = {},
        patient: bool = False,
    ) -> dict[str, Any]:
        """Return the server's answer, a JSON object. Repeat the request while the server cannot answer.

        ``body`` is sent as JSON. ``patient`` repeats the request without a time limit. Raise ServerUnavailable if the
        server cannot be reached, has no room, or is not a kqueue server, and other errors of the server as they are.
        """
        return _content(await self._answer(patient, method, path, params=query, json=body, headers=headers))

    async def read(self, path: str, *, headers: Mapping[str, str] = {}) -> str:
        """Return the text at a path. The errors are the ones of :meth:`ask`."""
        return (await self._answer(False, "GET", path, headers=headers)).text

    async def _answer(self, patient: bool, method: str, path: str, **parts: Any) -> httpx.Response:
        """Return the server's successful answer."""
        if self._http is None:
            self._http = self._open()
        began, pause_s = time.monotonic(), _PAUSE_S[0]
        while True:
            wait_s = 0.0
            try:
                answer = await self._http.request(method, path, **parts)
            except httpx.RequestError as fault:
                error: KqueueError = ServerUnavailable(
                    f"{self.url} cannot be reached ({str(fault) or type(fault).__name__}): check the address, and "
                    "that `kqueue serve` runs there"
                )
            else:
                if answer.is_success:
                    return answer
                error = _error(answer)
                if isinstance(error, AccessRefused) and "Authorization" not in {**self._headers, **parts["headers"]}:
                    raise AccessRefused(f"{self.url} needs a token: set KQUEUE_TOKEN, or pass it to the client")
                # A budget can be used up for days, so the caller decides whether to wait.
                if answer.status_code not in _AGAIN or isinstance(error, BudgetSpent):
                    raise error
                wait_s = _retry_after_s(answer)
            if not patient and time.monotonic() - began > self._retry_s:
                raise error
            _log.debug("the request is repeated after a pause: %s", error)
            await asyncio.sleep(max(wait_s, pause_s) * random.uniform(0.5, 1.0))  # noqa: S311 no secret
            pause_s = min(2 * pause_s, _PAUSE_S[1])

    async def close(self) -> None:
        """Close all connections."""
        if self._http is not None:
            await self._http.aclose()

    def _open(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self._connections)
        path = self.url.removeprefix(_UNIX) if self.url.startswith(_UNIX) else None
        uds = None if path is None else httpx.AsyncHTTPTransport(uds=path, limits=limits)
        return httpx.AsyncClient(
            base_url=self.url if path is None else "http://localhost",
            headers=self._headers,
            timeout=httpx.Timeout(60.0, connect=10.0, pool=None),
            limits=limits,
            transport=self._transport or uds,
        )


def _checked_url(url: str) -> str:
    """Return a server's URL without a slash at its end, or raise ConfigError."""
    if url.startswith(f"{_UNIX}/"):
        return url
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.scheme not in {"http", "https"} or not parsed.host or (parsed.port or 0) > 65535:
        raise ConfigError("KQUEUE_URL: not an HTTP URL. Use http://host:18188, or unix:///path of a unix socket")
    return url.rstrip("/")


def _checked_token(token: SecretStr) -> str:
    """Return a token that is valid in a header, or raise ConfigError."""
    secret = token.get_secret_value().strip()
    if not secret.isascii() or not secret.isprintable() or " " in secret:
        raise ConfigError("KQUEUE_TOKEN: malformed. Use a token that `kqueue token create` printed (kq_...)")
    return secret


def _content(answer: httpx.Response) -> dict[str, Any]:
    """Return the JSON object of a successful answer, or raise ServerUnavailable for any other content."""
    with suppress(ValueError):
        if isinstance(content := answer.json(), dict):
            return cast("dict[str, Any]", content)
    raise _not_kqueue(answer)


def _error(answer: httpx.Response) -> KqueueError:
    """Return the exception for an answer with an error status."""
    try:
        return wire.load_error(answer.json())
    except (ValueError, KeyError, TypeError, AttributeError):
        return _not_kqueue(answer)


def _not_kqueue(answer: httpx.Response) -> ServerUnavailable:
    return ServerUnavailable(
        f"{answer.request.url} answers {answer.status_code}, but not like a kqueue server: check the address"
    )


def _retry_after_s(answer: httpx.Response) -> float:
    """Return the seconds after which the server asks for a repeated request, or 0 if it names none."""
    try:
        return min(float(int(answer.headers.get("Retry-After", 0))), _LONGEST_WAIT_S)
    except ValueError:
        # Proxies can send a date instead.
        return 0.0
