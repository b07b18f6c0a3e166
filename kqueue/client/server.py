"""Requests to one `kqueue serve`, repeated while it cannot answer."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import urlsplit

from kqueue.client import wire
from kqueue.client.connections import UNIX, Answer, Http
from kqueue.errors import AccessRefused, BudgetSpent, ConfigError, KqueueError, ServerUnavailable

if TYPE_CHECKING:
    from pydantic import SecretStr

_log = logging.getLogger(__name__)

#: Statuses after which a request is repeated: no room, or a server or proxy that cannot answer now.
_AGAIN: Final = frozenset({429, 502, 503, 504})
#: First and longest pause in seconds before a request is repeated. The pause doubles each time.
_PAUSE_S: Final = (0.1, 5.0)
#: Longest pause in seconds that a server can request.
_LONGEST_WAIT_S: Final = 30.0


class Server(wire.Operations):
    """The HTTP interface of a server. All methods except the constructor must run in one event loop.

    ``url`` is ``http://host:18188`` or ``unix:///path``. A request is repeated for ``retry_s`` seconds before the error
    is raised, and ``connections`` connections are kept open. ``http`` replaces the connections to ``url``, and
    :meth:`close` closes it. Raise ConfigError for another URL or a malformed token.
    """

    def __init__(
        self, url: str, token: SecretStr | None, *, retry_s: float, connections: int, http: Http | None = None
    ) -> None:
        self.url = _checked_url(url)
        self._headers = {} if token is None else {"Authorization": f"Bearer {_checked_token(token)}"}
        self._retry_s = retry_s
        self._http = http or Http(self.url, connections)

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
        return (await self._answer(False, "GET", path, headers=headers)).body.decode(errors="replace")

    async def _answer(self, patient: bool, method: str, path: str, **parts: Any) -> Answer:
        """Return the server's successful answer."""
        headers = parts["headers"] = {**self._headers, **parts["headers"]}
        began, pause_s = time.monotonic(), _PAUSE_S[0]
        while True:
            wait_s = 0.0
            try:
                answer = await self._http.request(method, path, **parts)
            except OSError as fault:
                error: KqueueError = ServerUnavailable(
                    f"{self.url} cannot be reached ({str(fault) or type(fault).__name__}): check the address, and "
                    "that `kqueue serve` runs there"
                )
            else:
                if 200 <= answer.status < 300:
                    return answer
                error = _error(answer)
                if isinstance(error, AccessRefused) and answer.status == 401 and "Authorization" not in headers:
                    raise AccessRefused(f"{self.url} needs a token: set KQUEUE_TOKEN, or pass it to the client")
                # A budget can be used up for days, so the caller decides whether to wait.
                if answer.status not in _AGAIN or isinstance(error, BudgetSpent):
                    raise error
                wait_s = _retry_after_s(answer)
            if not patient and time.monotonic() - began > self._retry_s:
                raise error
            _log.debug("the request is repeated after a pause: %s", error)
            await asyncio.sleep(max(wait_s, pause_s) * random.uniform(0.5, 1.0))  # noqa: S311 no secret
            pause_s = min(2 * pause_s, _PAUSE_S[1])

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()


def _checked_url(url: str) -> str:
    """Return a server's URL without a slash at its end, or raise ConfigError."""
    if url.startswith(f"{UNIX}/"):
        return url
    with suppress(ValueError):
        parsed = urlsplit(url)
        # A malformed host or port raises ValueError.
        if parsed.scheme in {"http", "https"} and (parsed.hostname or "").encode("idna") and parsed.port != 0:
            return url.rstrip("/")
    raise ConfigError("KQUEUE_URL: not an HTTP URL. Use http://host:18188, or unix:///path of a unix socket")


def _checked_token(token: SecretStr) -> str:
    """Return a token that is valid in a header, or raise ConfigError."""
    secret = token.get_secret_value().strip()
    if not secret.isascii() or not secret.isprintable() or " " in secret:
        raise ConfigError("KQUEUE_TOKEN: malformed. Use a token that `kqueue token create` printed (kq_...)")
    return secret


def _content(answer: Answer) -> dict[str, Any]:
    """Return the JSON object of a successful answer, or raise ServerUnavailable for any other content."""
    with suppress(ValueError):
        if isinstance(content := json.loads(answer.body), dict):
            return cast("dict[str, Any]", content)
    raise _not_kqueue(answer)


def _error(answer: Answer) -> KqueueError:
    """Return the exception for an answer with an error status."""
    try:
        return wire.load_error(json.loads(answer.body))
    except (ValueError, KeyError, TypeError, AttributeError):
        return _not_kqueue(answer)


def _not_kqueue(answer: Answer) -> ServerUnavailable:
    return ServerUnavailable(f"{answer.url} answers {answer.status}, but not like a kqueue server: check the address")


def _retry_after_s(answer: Answer) -> float:
    """Return the seconds after which the server asks for a repeated request, or 0 if it names none."""
    try:
        return min(float(int(answer.headers.get("retry-after", 0))), _LONGEST_WAIT_S)
    except ValueError:
        # Proxies can send a date instead.
        return 0.0
