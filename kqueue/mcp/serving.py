"""The tools' server, on stdio and on streamable HTTP."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import Any, Final

import anyio
from mcp.server import MCPServer
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.stdio import stdio_server
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.message import SessionMessage
from mcp_types import PARSE_ERROR, ErrorData, JSONRPCError
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kqueue import registry
from kqueue.errors import AccessRefused, ConfigError, KqueueError, ServiceError
from kqueue.http import failures, is_loopback
from kqueue.http.server import Server, listen, outlive_signals
from kqueue.mcp import files, tools
from kqueue.mcp.connection import Connection, Sees
from kqueue.mcp.rendering import INSTRUCTIONS

#: Path of the tools below the server's address.
PATH: Final = "/mcp"
#: Maximum number of open sessions. A session ends half an hour after its last request.
_SESSIONS: Final = 1000
#: Seconds between two checks of a stream's token.
_LOOK_AGAIN_S: Final = 2.0
_LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")


def make_server(connection: Connection) -> MCPServer[Connection]:
    """Return a server of the tools that reaches the fleet through ``connection``. It connects when it runs."""

    @asynccontextmanager
    async def lifespan(_: MCPServer[Connection]) -> AsyncGenerator[Connection]:
        async with connection.opened():
            yield connection

    server = MCPServer[Connection](
        "kqueue",
        title="kqueue: a judge of GPU kernels",
        instructions=INSTRUCTIONS.format(advice="".join(registry.each_of("advice"))),
        version=version("kqueue"),
        tools=tools.every(),
        lifespan=lifespan,
        # No resource changes, so subscriptions are useless.
        subscriptions=False,
    )
    files.register(server)
    return server


def serve_stdio(owner: str | None, sees: Sees, limits: str) -> None:
    """Serve one client on stdin and stdout until it closes them. Calls use this process's credential.

    :class:`~kqueue.mcp.connection.Connection` describes the arguments.
    """
    server = make_server(Connection(relays=False, owner=owner, sees=sees, limits=limits))
    # The thread that reads stdin cannot be interrupted, and a graceful shutdown would wait for it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    anyio.run(_serve_stdio, server)


async def _serve_stdio(server: Any) -> None:
    """Run a server of the tools on stdio, with error answers to invalid JSON, which the SDK ignores."""
    sdk = server._lowlevel_server
    async with stdio_server() as (lines, answers), anyio.create_task_group() as tasks:
        readable, messages = anyio.create_memory_object_stream[SessionMessage | Exception]()

        async def read() -> None:
            async with readable:
                async for item in lines:
                    if isinstance(item, ValidationError) and item.errors()[0]["type"] == "json_invalid":
                        await answers.send(SessionMessage(_not_json(item)))
                    else:
                        await readable.send(item)

        tasks.start_soon(read)
        await sdk.run(messages, answers, sdk.create_initialization_options())


def _not_json(error: ValidationError) -> JSONRPCError:
    """Return the error answer to a line of invalid JSON, with the request's id if it can be read."""
    # The usual cause is an escaped half of a surrogate pair such as \ud800, which Python's own parser accepts.
    [fault] = error.errors()
    identity = None
    with contextlib.suppress(ValueError, RecursionError):
        match json.loads(fault["input"]):
            case {"id": int() | str() as identity} if str(identity).isprintable():
                pass
            case _:
                identity = None
    refusal = ErrorData(code=PARSE_ERROR, message=f"{fault['msg']}. Send the request again as valid JSON in UTF-8.")
    return JSONRPCError(jsonrpc="2.0", id=identity, error=refusal)


def serve_http(address: str, hosts: Sequence[str], report: Callable[[str], None], sees: Sees, limits: str) -> None:
    """Serve streamable HTTP until SIGTERM, SIGINT or SIGHUP. Every request must carry a token of the fleet.

    ``address`` is ``host:port``. Port 0 selects any free port, and ``report`` is called with a line that names it.
    ``hosts`` are additional names by which clients reach this server. ``sees`` and ``limits`` belong to
    :class:`~kqueue.mcp.connection.Connection`.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--http: {address!r} is not an address: use HOST:PORT, such as 127.0.0.1:18189")
    host = host.removeprefix("[").removesuffix("]")
    connection = Connection(relays=True, sees=sees, limits=limits)
    app = create_app(connection, [*(_LOOPBACK if is_loopback(host) else (address.rpartition(":")[0],)), *hosts])
    with listen(host, int(port)) as listening:
        outlive_signals()
        shown = f"[{host}]" if ":" in host else host
        report(f"kqueue mcp serves http://{shown}:{listening.getsockname()[1]}{PATH}")
        Server(app).run([listening])


def create_app(connection: Connection, hosts: Sequence[str]) -> Starlette:
    """Return the application for streamable HTTP.

    ``connection`` must relay. ``hosts`` are the accepted names in the header `Host`, because any other name could
    belong to a web page that was bound to this address (DNS rebinding).
    """
    named = [form for host in hosts for form in (host, f"{host}:*")]
    app = make_server(connection).streamable_http_app(
        streamable_http_path=PATH,
        max_request_body_size=connection.max_body_bytes,
        max_sessions=_SESSIONS,
        transport_security=TransportSecuritySettings(
            allowed_hosts=named,
            allowed_origins=[f"{scheme}://{form}" for form in named for scheme in ("http", "https")],
        ),
    )
    app.add_middleware(_Tokens, connection=connection)
    return app


class _Tokens:
    """Middleware that refuses requests without a valid token of the fleet, before it reads their bodies.

    A session belongs to the token that opened it. Each tool call uses the token of the request that makes it.
    """

    def __init__(self, app: ASGIApp, connection: Connection) -> None:
        self._app = app
        self._connection = connection

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            check = partial(self._connection.caller(headers).ask, "GET", "/v1/categories")
            await check()
        except AccessRefused as error:
            challenge = {"WWW-Authenticate": 'Bearer realm="kqueue"'}
            refusal = failures.answer(scope["path"], 401, "unauthenticated", str(error), headers=challenge)
            await refusal(scope, receive, send)
            return
        except ServiceError:
            detail = "the fleet cannot be reached at the moment: try again"
            await failures.answer(scope["path"], 503, "database_unavailable", detail)(scope, receive, send)
            return
        except KqueueError as error:
            await failures.refusal(error, scope["path"])(scope, receive, send)
            return
        # The SDK compares this hash with the session's. It never sees the secret itself.
        owner = hashlib.sha256(headers["authorization"].encode()).hexdigest()
        scope["user"] = AuthenticatedUser(AccessToken(token=owner, client_id=owner, scopes=[]))
        async with anyio.create_task_group() as tasks:
            if scope["method"] == "GET":  # tools look for verdicts every few seconds, with the token
                tasks.start_soon(_end_with_token, check, tasks.cancel_scope)
            await self._app(scope, receive, send)
            tasks.cancel_scope.cancel()


async def _end_with_token(check: Callable[[], Awaitable[object]], stream: anyio.CancelScope) -> None:
    """Cancel a stream when its token is refused."""
    with contextlib.suppress(AccessRefused):
        while True:
            await anyio.sleep(_LOOK_AGAIN_S)
            # While the fleet cannot be reached, nothing is known about the token.
            with contextlib.suppress(ServiceError):
                await check()
    stream.cancel()
