"""The connection to the fleet, with the caller's credential.

It leads to the HTTP API of a `kqueue serve` if a URL is set, else to an HTTP application in this process that uses the
fleet's Postgres and Redis. Both check the same rights.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final
from uuid import uuid4

import anyio
import httpx
from mcp.server.mcpserver import Context

from kqueue.client.connections import Answer, Http
from kqueue.client.server import Server
from kqueue.client.wire import Operations
from kqueue.config import Config, load
from kqueue.errors import AccessRefused, ConfigError
from kqueue.http import SESSION

#: Seconds for which a request that the fleet cannot answer is repeated before an agent gets the error.
_RETRY_S: Final = 10.0
#: Number of connections to the fleet that are kept open.
_CONNECTIONS: Final = 32
#: URL of the HTTP application in this process.
_HERE: Final = "http://localhost"


class _InProcess(Http):
    """The requests to an HTTP application in this process."""

    def __init__(self, app: Any) -> None:
        super().__init__(_HERE, 0)
        self._app = httpx.AsyncClient(base_url=_HERE, transport=httpx.ASGITransport(app, raise_app_exceptions=False))

    async def request(self, method: str, path: str, **parts: Any) -> Answer:
        answer = await self._app.request(method, path, **parts)
        return Answer(str(answer.url), answer.status_code, answer.headers, answer.content)

    async def close(self) -> None:
        await self._app.aclose()


class Sees(StrEnum):
    """The work that an agent sees."""

    SESSION = "session"
    """The submissions of the agent in this session."""
    OWNER = "owner"
    """The work of its owner."""
    ALL = "all"
    """Everything that its credential can read."""


@dataclass(frozen=True, slots=True)
class Caller(Operations):
    """The caller of a tool. Its requests carry its token. ``batch`` is the name of its session and of its batch."""

    _connection: Connection
    _headers: Mapping[str, str]
    batch: str | None

    async def ask(self, method: str, path: str, *, headers: Mapping[str, str] = {}, **parts: Any) -> dict[str, Any]:
        """Return the fleet's answer, a JSON object. :meth:`kqueue.client.server.Server.ask` has the errors."""
        return await (await self._connection.server()).ask(method, path, headers={**headers, **self._headers}, **parts)

    async def read(self, path: str) -> str:
        """Return the text at a path. :meth:`kqueue.client.server.Server.read` has the errors."""
        return await (await self._connection.server()).read(path, headers=self._headers)


class Connection:
    """The connection to a fleet.

    Args:
        relays: True if every caller must send its own token. False if all calls use the token or the database's
            credentials of this process.
        owner: the owner for whom alone all calls act, if the fleet is reached through its database. None for the owner
            of the login, or ``local`` for a login of the fleet itself.
        sees: the work that agents see.
        limits: the limits of each session, in the form of the header that names it (:mod:`kqueue.http.auth`).
    """

    def __init__(self, *, relays: bool, owner: str | None = None, sees: Sees = Sees.SESSION, limits: str = "") -> None:
        self._relays = relays
        self._owner = owner
        self._sees = sees
        self._limits = limits
        self._session = f"mcp-{uuid4().hex[:16]}"
        # Without relaying, the fleet is looked up at the first call, because it can start later than the tools.
        self._fleet = _find() if relays else None
        self._opening = anyio.Lock()
        self._stack = AsyncExitStack()
        self._server: Server | None = None

    @property
    def max_body_bytes(self) -> int:
        """Maximum bytes of a request's body."""
        return load().http_max_body_bytes

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[Connection]:
        """Connect to the fleet, and disconnect at the end of the block.

        Without relaying, the connection opens at the first call: an agent can list its tools before a fleet runs, and
        finds a fleet that starts later.
        """
        async with AsyncExitStack() as self._stack:
            if self._relays:
                await self.server()
            yield self
        self._server = None

    async def server(self) -> Server:
        """Return the connection to the fleet, and open it if necessary. A URL is first used by a call."""
        async with self._opening:
            if self._server is None:
                self._server = await self._connect(*(self._fleet or _find(self._owner)))
            return self._server

    async def _connect(self, config: Config, url: str | None) -> Server:
        if url is not None:
            # Relayed calls must not use the token of this process.
            token = None if self._relays else config.token
            server = Server(url, token, retry_s=_RETRY_S, connections=_CONNECTIONS)
        else:
            from kqueue.http.app import create_app
            from kqueue.http.server import from_peer
            from kqueue.store import roles
            from kqueue.store.engine import FLEET, acting

            # The tools' own requests need no access log.
            app = create_app(config.model_copy(update={"http_access_log": False}))
            await self._stack.enter_async_context(app.router.lifespan_context(app))
            with acting(FLEET):
                trusted, owner = await app.state.gateway.read(roles.identity)
            if self._owner is not None and not trusted:
                raise ConfigError("--owner: the login in KQUEUE_DATABASE_URL has its own owner: omit it")
            owner = None if self._sees is Sees.ALL else self._owner or owner
            # A process with the database's credentials acts as the fleet's owner. A relayed caller sends a token.
            own = app if self._relays else from_peer(app, os.geteuid(), owner)
            server = Server(_HERE, None, retry_s=_RETRY_S, connections=_CONNECTIONS, http=_InProcess(own))
        self._stack.push_async_callback(server.close)
        return server

    def caller(self, headers: Mapping[str, str] | None) -> Caller:
        """Return the caller of a message with these headers, which are None on stdio.

        Raise AccessRefused if the message needs a token and has no valid one.
        """
        if not self._relays:
            return self._caller({}, self._session)
        credential = (headers or {}).get("authorization")
        if not credential:
            # Otherwise a fleet that trusts this process would serve anyone who can reach it.
            raise AccessRefused("give a token of the fleet: Authorization: Bearer kq_...")
        if not credential.isascii() or not credential.isprintable():
            raise AccessRefused("the token is malformed: use one that `kqueue token create` printed (kq_...)")
        # A session of the protocol, or all requests of a client that begins none.
        about = f"{credential} {(headers or {}).get('mcp-session-id')}"
        return self._caller({"Authorization": credential}, f"mcp-{hashlib.sha256(about.encode()).hexdigest()[:16]}")

    def _caller(self, headers: Mapping[str, str], session: str) -> Caller:
        """Return a caller who is restricted to the work that agents see."""
        if self._sees is Sees.ALL:
            return Caller(self, headers, None)
        batch = session if self._sees is Sees.SESSION else None
        return Caller(self, {**headers, SESSION: (batch or "") + self._limits}, batch)


#: Context that the SDK passes to tools and resources.
Call = Context[Connection, Any]


def caller_of(call: Call) -> Caller:
    """Return the caller of a tool."""
    return call.request_context.lifespan_context.caller(call.headers)


def _find(owner: str | None = None) -> tuple[Config, str | None]:
    """Return the settings, and the server's URL or None for a fleet that is reached through its database.

    With an ``owner`` the database is used. A server would use the owner of the token.
    """
    config, named = load(), Config()
    if owner is None and config.url is not None and (named.url is not None or named.database_url is None):
        return config, config.url
    config.require_database()
    config.require_redis()
    return config, None
