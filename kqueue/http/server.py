"""The process of `kqueue serve`: a socket, the application on it, and a graceful end."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Final

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from kqueue.config import Config
from kqueue.errors import ConfigError
from kqueue.http.app import create_app
from kqueue.http.auth import open_to_all
from kqueue.store import schema
from kqueue.store.engine import connect

#: How long requests in progress may take to end when the server is stopped, in seconds.
_GRACE_S: Final = 10
#: How long a request may take to come in, from the connection or the end of the one before, in seconds.
RECEIVE_S: Final = 60.0
#: The most connections at once, where the process may have so many files, and the files that it needs beside them.
_CONNECTIONS: Final = 16_384
_OWN_FILES: Final = 100
#: What connections inherit from the socket that listens. An answer's body does not wait until its head is acknowledged,
#: which may take 40 ms; asyncio sees to that only for sockets that were made with their protocol's number. And a peer
#: that vanished without a word is noticed within two minutes, however long its request waits.
_OPTIONS: Final = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)


def serve(config: Config, report: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; whoever waits then is told to ask again.

    Args:
        config: the fleet's settings.
        report: is told where the server listens.

    Raises:
        ConfigError: the address cannot be listened on, or a setting is missing.
        DatabaseUnavailable, SchemaMismatch: the database cannot be used.
    """
    config.require_redis()
    engine = connect(config.require_database(), application="kqueue-http", pool_size=1)
    try:
        schema.check(engine)
    finally:
        engine.dispose()
    app = create_app(config)
    with listen(config.http_address, config.http_port) as listening:
        address = f"[{config.http_address}]" if ":" in config.http_address else config.http_address
        who = "no token needed" if open_to_all(config) else "tokens needed"
        # uvicorn raises the signal that ended it once more, which is no failure.
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, _ignore)
        report(f"kqueue serves http://{address}:{listening.getsockname()[1]} ({who})")
        Server(app).run([listening])


def _ignore(_signum: int, _frame: FrameType | None) -> None:
    """The signal has done its work."""


def listen(host: str, port: int) -> socket.socket:
    """A socket for :class:`Server`; port 0 is any that is free.

    Raises:
        ConfigError: the address cannot be listened on.
    """
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
            f"cannot listen on {host}:{port} ({error.strerror}): choose others with KQUEUE_HTTP_ADDRESS and "
            "KQUEUE_HTTP_PORT, or --host and --port (port 0: any that is free)"
        ) from error
    return listening


def _room() -> int:
    """How many connections there may be; the soft limit on files is raised for them as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _CONNECTIONS + _OWN_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(wanted - _OWN_FILES, 1)


class _Protocol(H11Protocol):
    """uvicorn's, with an end to requests that do not come in: who only holds connections would keep others out."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._watched()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.conn.their_state not in {h11.IDLE, h11.SEND_BODY}:
            self._watched()
        elif self._late is None:
            self._late = self.loop.call_later(RECEIVE_S, self.transport.abort)

    def _watched(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class Server(uvicorn.Server):
    """uvicorn that lets waiting requests answer when it is told to stop, instead of waiting for them."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_Protocol,
                ws="none",
                log_config=None,
                access_log=False,
                limit_concurrency=_room(),
                timeout_graceful_shutdown=_GRACE_S,
                server_header=False,
                proxy_headers=False,
            )
        )
        self._app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        door = getattr(self._app.state, "door", None)
        if door is not None:
            door.stopping.set()
        super().handle_exit(sig, frame)
