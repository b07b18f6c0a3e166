"""The way to the fleet, in the name of whoever calls.

Behind it is the HTTP API: of a `kqueue serve` where a URL is known, else one in this process, on the fleet's own
Postgres and Redis. Both decide alike who may do what.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import anyio
import httpx
from mcp.server.mcpserver import Context

from kqueue.client.server import Server
from kqueue.config import Config, load
from kqueue.errors import AccessRefused

#: Seconds for which a fleet that cannot answer is asked again, before an agent hears of it.
_RETRY_S: Final = 10.0
#: Connections to the fleet that are kept open.
_CONNECTIONS: Final = 32


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever calls a tool; what is asked is asked with the caller's token."""

    _door: Door
    _headers: Mapping[str, str]

    async def ask(self, method: str, path: str, *, body: Any = None, query: Mapping[str, Any] = {}) -> dict[str, Any]:
        """As :meth:`~kqueue.client.server.Server.ask`."""
        server = await self._door.server()
        return await server.ask(method, path, body=body, query=query, headers=self._headers)

    async def read(self, path: str) -> str:
        """As :meth:`~kqueue.client.server.Server.read`."""
        server = await self._door.server()
        return await server.read(path, headers=self._headers)


class Door:
    """The way to a fleet.

    Args:
        relays: True if every caller shows a token of its own, and nothing is done without one; False if all calls are
            this process's own, with the token or the credentials that it has.

    Raises:
        ConfigError: it relays and no fleet is known, or a setting is wrong.
    """

    def __init__(self, *, relays: bool) -> None:
        self._relays = relays
        #: The fleet of an agent's own tools may be started after them.
        self._fleet = _find() if relays else None
        self._opening = anyio.Lock()
        self._stack = AsyncExitStack()
        self._server: Server | None = None

    @property
    def max_body_bytes(self) -> int:
        """The largest body of a request, in bytes."""
        return load().http_max_body_bytes

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[Door]:
        """Connect, and release everything in the end. A door that does not relay connects at the first call.

        An agent starts its tools with itself. It can list them before there is a fleet, and a fleet that is started
        later is found.

        Raises:
            ConfigError, DatabaseUnavailable, SchemaMismatch: as :meth:`server`.
        """
        async with AsyncExitStack() as self._stack:
            if self._relays:
                await self.server()
            yield self
        self._server = None

    async def server(self) -> Server:
        """Return the connection to the fleet, which is opened where it is not yet.

        Raises:
            ConfigError: no fleet is known, or a setting is wrong.
            DatabaseUnavailable, SchemaMismatch: the fleet's database cannot be used. A server is asked only by calls.
        """
        async with self._opening:
            if self._server is None:
                self._server = await self._connect(*(self._fleet or _find()))
            return self._server

    async def _connect(self, config: Config, url: str | None) -> Server:
        if url is not None:
            # The token of this process is not for others' calls.
            token = None if self._relays else config.token
            server = Server(url, token, retry_s=_RETRY_S, connections=_CONNECTIONS)
        else:
            from kqueue.http.app import create_app
            from kqueue.http.server import from_peer

            # Its requests are this process's own.
            app = create_app(config.model_copy(update={"http_access_log": False}))
            await self._stack.enter_async_context(app.router.lifespan_context(app))
            # Who has the database's credentials is the fleet's owner. Who is relayed shows a token.
            own = app if self._relays else from_peer(app, os.geteuid())
            transport = httpx.ASGITransport(own, raise_app_exceptions=False)
            server = Server("http://localhost", None, retry_s=_RETRY_S, connections=_CONNECTIONS, transport=transport)
        self._stack.push_async_callback(server.close)
        return server

    def caller(self, headers: Mapping[str, str] | None) -> Caller:
        """Return the caller of a message that came with these headers; None on stdio.

        Raises:
            AccessRefused: the message shows no token, and needs one.
        """
        if not self._relays:
            return Caller(self, {})
        credential = (headers or {}).get("authorization")
        if not credential:
            # Without this a fleet that trusts this process would let in whoever can reach it.
            raise AccessRefused("give a token of the fleet: Authorization: Bearer kq_...")
        if not credential.isascii() or not credential.isprintable():
            raise AccessRefused("the token is not one that `kqueue token create` printed; it begins with kq_")
        return Caller(self, {"Authorization": credential})


#: What the tools and resources get from the SDK.
Call = Context[Door, Any]


def caller_of(call: Call) -> Caller:
    """Return the caller of a tool."""
    return call.request_context.lifespan_context.caller(call.headers)


def _find() -> tuple[Config, str | None]:
    """Return the settings, and the server's URL.

    It is None where a database is given and no URL, or where this machine's fleet serves no HTTP.

    Raises:
        ConfigError: no fleet is known, or a setting is wrong.
    """
    config, named = load(), Config()
    if config.url is not None and (named.url is not None or named.database_url is None):
        return config, config.url
    config.require_database()
    config.require_redis()
    return config, None
