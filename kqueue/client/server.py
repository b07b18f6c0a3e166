"""Asking one `kqueue serve`, again where it cannot answer now."""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from kqueue.client import wire
from kqueue.errors import BudgetSpent, ConfigError, KqueueError, ServerUnavailable

if TYPE_CHECKING:
    from pydantic import SecretStr

#: httpx's command line brings in rich and pygments, which take a third of the time that a client needs to start.
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

#: Statuses after which the same is asked again: no room, or a server or proxy that cannot answer now.
_AGAIN: Final = frozenset({429, 502, 503, 504})
#: The first pause before something is asked again, doubled each time, and the longest.
_PAUSE_S: Final = (0.1, 5.0)
#: The beginning of a unix socket's URL. The socket's path follows.
_UNIX: Final = "unix://"
#: The longest pause that a server can ask for.
_LONGEST_WAIT_S: Final = 30.0


class Server:
    """A server's HTTP interface. All methods but the constructor belong to one event loop.

    Args:
        url: its address, ``http://host:18188`` or ``unix:///path``.
        token: the token to send; None for none.
        retry_s: seconds for which something is asked again before the error is raised.
        connections: connections that are kept open.
        transport: the way to it, instead of the one that ``url`` tells; :meth:`close` closes it.

    Raises:
        ConfigError: ``url`` is neither one of HTTP nor of a unix socket, or ``token`` cannot be one.
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
        """Return the JSON object that the server answers. It is asked again while it cannot answer.

        Args:
            method: of HTTP.
            path: below the server's URL.
            body: sent as JSON.
            query: the URL's parameters.
            headers: of this request alone.
            patient: ask without a limit on time.

        Raises:
            ServerUnavailable: the server cannot be reached, has no room, or is not kqueue's.
            KqueueError: what else it answers.
        """
        return _content(await self._answer(method, path, body, query, headers, patient))

    async def read(self, path: str, *, headers: Mapping[str, str] = {}) -> str:
        """Return the text at a path; arguments and errors as :meth:`ask`."""
        return (await self._answer("GET", path, None, {}, headers, False)).text

    async def _answer(
        self,
        method: str,
        path: str,
        body: Any,
        query: Mapping[str, Any],
        headers: Mapping[str, str],
        patient: bool,
    ) -> httpx.Response:
        """Return the server's answer, which is a success."""
        if self._http is None:
            self._http = self._open()
        began, pause_s = time.monotonic(), _PAUSE_S[0]
        while True:
            wait_s = 0.0
            try:
                answer = await self._http.request(method, path, params=query, json=body, headers=headers)
            except httpx.RequestError as fault:
                error: KqueueError = ServerUnavailable(
                    f"{self.url} cannot be reached ({str(fault) or type(fault).__name__}): check the address, and "
                    "that `kqueue serve` runs there"
                )
            else:
                if answer.is_success:
                    return answer
                error = _error(answer)
                # A budget may be used up for days: whoever submits decides whether to wait.
                if answer.status_code not in _AGAIN or isinstance(error, BudgetSpent):
                    raise error
                wait_s = _retry_after_s(answer)
            if not patient and time.monotonic() - began > self._retry_s:
                raise error
            _log.debug("asked again in a moment: %s", error)
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
    """Return a server's URL without a slash at its end.

    Raises:
        ConfigError: it is neither one of HTTP nor of a unix socket.
    """
    if url.startswith(f"{_UNIX}/"):
        return url
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.scheme not in {"http", "https"} or not parsed.host or (parsed.port or 0) > 65535:
        raise ConfigError("KQUEUE_URL: not one of HTTP; use http://host:18188, or unix:///path of a unix socket")
    return url.rstrip("/")


def _checked_token(token: SecretStr) -> str:
    """Return a token that a header can hold.

    Raises:
        ConfigError: a header cannot hold it.
    """
    secret = token.get_secret_value().strip()
    if not secret.isascii() or not secret.isprintable() or " " in secret:
        raise ConfigError("KQUEUE_TOKEN: not one that `kqueue token create` printed; it begins with kq_")
    return secret


def _content(answer: httpx.Response) -> dict[str, Any]:
    """Return what a successful answer says.

    Raises:
        ServerUnavailable: it is no JSON object, so no kqueue answered.
    """
    try:
        content = answer.json()
    except ValueError:
        raise _stranger(answer) from None
    if not isinstance(content, dict):
        raise _stranger(answer)
    return cast("dict[str, Any]", content)


def _error(answer: httpx.Response) -> KqueueError:
    """Return the exception that an answer stands for that is no success."""
    try:
        return wire.load_error(answer.json())
    except (ValueError, KeyError, TypeError, AttributeError):
        return _stranger(answer)


def _stranger(answer: httpx.Response) -> ServerUnavailable:
    return ServerUnavailable(
        f"{answer.request.url} answers {answer.status_code} and nothing that kqueue would: check the address"
    )


def _retry_after_s(answer: httpx.Response) -> float:
    """Return the seconds after which the server wants to be asked again; 0 if it names none."""
    try:
        return min(float(int(answer.headers.get("Retry-After", 0))), _LONGEST_WAIT_S)
    except ValueError:
        # A date, as proxies may give.
        return 0.0
