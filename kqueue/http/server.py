"""The process of `kqueue serve`: its sockets, its application, and its graceful shutdown."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import socket
import struct
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, cast

import h11
import uvicorn
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn import server as uvicorn_server
from uvicorn.protocols.http.h11_impl import H11Protocol

from kqueue.config import Config
from kqueue.errors import ConfigError
from kqueue.http import OPEN_WARNING, trusts_local_users
from kqueue.http.auth import PEER_OWNER, PEER_UID
from kqueue.signals import ending
from kqueue.store import schema

#: Seconds in which active requests can end when the server stops.
_GRACE_S: Final = 10
#: Maximum number of concurrent connections if the limit on open files allows them.
_CONNECTIONS: Final = 16_384
#: Number of files that the process opens in addition to its connections.
_OWN_FILES: Final = 100
#: Options that connections inherit from the listening socket. TCP_NODELAY sends an answer's body without waiting for
#: the acknowledgement of its head, which can take 40 ms. asyncio sets it only for sockets that were created with their
#: protocol's number. The keep-alive options detect a vanished peer within two minutes, however long its request waits.
_OPTIONS: Final = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)


def serve(config: Config, make: Callable[[Config], FastAPI], report: Callable[[str], None]) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP. Requests that wait then answer 503, and their clients try again.

    ``report`` is called with a line for each address, and with the warning if there is one.
    """
    config.require_redis()
    with schema.checked(config.require_database(), application="kqueue-http"):
        app = make(config)
    with ExitStack() as stack:
        sockets = [stack.enter_context(listen(config.http_address, config.http_port))]
        address = f"[{config.http_address}]" if ":" in config.http_address else config.http_address
        url = f"http://{address}:{sockets[0].getsockname()[1]}"
        lines = [f"kqueue serves {url}", f"its page is {url}/: `kqueue open` logs a browser in"]
        if config.http_socket is not None:
            path = config.http_socket.expanduser().absolute()
            sockets.append(stack.enter_context(listen_at(path)))
            stack.callback(path.unlink, missing_ok=True)
            lines.append(f"kqueue serves unix://{path}: its owner needs no token")
        if trusts_local_users(config):
            lines.append(OPEN_WARNING)
        outlive_signals()
        for line in lines:
            report(line)
        # Loaded modules are never freed. Frozen, they do not lengthen each garbage collection, which stops all threads.
        gc.collect()
        gc.freeze()
        Server(app).run(sockets)


def outlive_signals() -> None:
    """Make SIGTERM, SIGINT and SIGHUP end :class:`Server`, not this process. uvicorn raises them again at its end."""
    signals = ending()
    of_uvicorn: Any = uvicorn_server
    of_uvicorn.HANDLED_SIGNALS = tuple(signals)  # uvicorn's default lacks SIGHUP
    for signum in signals:
        signal.signal(signum, _ignore)


def _ignore(_signum: int, _frame: FrameType | None) -> None:
    """Ignore a signal that uvicorn has already handled."""


def listen(host: str, port: int) -> socket.socket:
    """Return a TCP socket for :class:`Server`, or raise ConfigError. Port 0 selects any free port."""
    try:
        [(family, kind, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        listening = socket.socket(family, kind)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            for option in _OPTIONS:
                listening.setsockopt(*option)
            listening.bind(address)
        except OSError:
            listening.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error.strerror}): choose another address with KQUEUE_HTTP_ADDRESS and "
            "KQUEUE_HTTP_PORT, or --host and --port (port 0: any free port)"
        ) from error
    return listening


def listen_at(path: Path) -> socket.socket:
    """Return a unix socket of mode 0600 for :class:`Server`. A missing folder is created with mode 0700."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_served(path):
            raise OSError(0, "another server listens there")
        path.unlink(missing_ok=True)
        # The mode is set before bind(), so that the file never has another one.
        os.fchmod(listening.fileno(), 0o600)
        listening.bind(os.fspath(path))
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"cannot listen on {path} ({error.strerror or error}): choose another path with KQUEUE_HTTP_SOCKET"
        ) from error
    return listening


def _is_served(path: Path) -> bool:
    """Return True if a server listens on a unix socket, False if the file is missing or stale."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
    return True


def _room() -> int:
    """Raise the soft limit on open files as far as possible, and return the number of connections it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _CONNECTIONS + _OWN_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(wanted - _OWN_FILES, 1)


class _Protocol(H11Protocol):
    """uvicorn's protocol, which passes on the peer of a unix socket and closes connections whose request is late.

    Idle connections would otherwise use up the limit on connections.
    """

    _late: asyncio.TimerHandle | None = None

    def __init__(
        self, *arguments: Any, receive_s: float, peer_uid: Callable[[socket.socket], int], **more: Any
    ) -> None:
        super().__init__(*arguments, **more)
        self._receive_s = receive_s
        self._peer_uid = peer_uid

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        connection: socket.socket = transport.get_extra_info("socket")
        if connection.family == socket.AF_UNIX:
            self.app = from_peer(self.app, self._peer_uid(connection))
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._watched()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        # The body ended early while the application reads it. uvicorn answers, so the application must not.
        cycle: Any = self.cycle  # None before the first request
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.close()
                return
        super().send_400_response(msg)

    def _watch(self) -> None:
        if self.conn.their_state not in {h11.IDLE, h11.SEND_BODY}:
            self._watched()
        elif self._late is None:
            self._late = self.loop.call_later(self._receive_s, self.transport.abort)

    def _watched(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def peer_uid(connection: socket.socket) -> int:
    """Return the uid of a unix socket's peer, which the operating system recorded when it connected."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    _pid, uid, _gid = struct.unpack("iII", credentials)
    return uid


def from_peer(app: Any, uid: int, owner: str | None = None) -> ASGIApp:
    """Return ``app`` for a connection whose peer has this uid, and acts for an owner only if one is given."""

    async def asked(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, PEER_UID: uid, PEER_OWNER: owner}, receive, send)

    return asked


class Server(uvicorn.Server):
    """uvicorn's server, whose waiting requests answer at once when it stops."""

    def __init__(
        self,
        app: Starlette,
        *,
        receive_s: float = 60.0,
        room: int | None = None,
        peer_uid: Callable[[socket.socket], int] = peer_uid,
    ) -> None:
        """Create a server with room for this number of connections, or for the limit on open files.

        A request ends at most ``receive_s`` seconds after a new connection, or after the end of the connection's last
        request.
        """
        super().__init__(
            uvicorn.Config(
                app,
                http=cast("type[asyncio.Protocol]", partial(_Protocol, receive_s=receive_s, peer_uid=peer_uid)),
                loop="asyncio",
                ws="none",
                log_config=None,
                access_log=False,
                limit_concurrency=_room() if room is None else room,
                timeout_graceful_shutdown=_GRACE_S,
                server_header=False,
                proxy_headers=False,
            )
        )
        self._app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        gateway = getattr(self._app.state, "gateway", None)
        if gateway is not None:
            gateway.stopping.set()
        super().handle_exit(sig, frame)
