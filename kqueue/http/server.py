"""The process of `kqueue serve`: a socket, the application on it, and a graceful end."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Final

import uvicorn
from fastapi import FastAPI

from kqueue.config import Config
from kqueue.errors import ConfigError
from kqueue.http.app import create_app
from kqueue.http.auth import open_to_all
from kqueue.store import schema
from kqueue.store.engine import connect

#: How long requests in progress may take to end when the server is stopped, in seconds.
_GRACE_S: Final = 10


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
    with _listen(config.http_address, config.http_port) as listening:
        address = f"[{config.http_address}]" if ":" in config.http_address else config.http_address
        who = "no token needed" if open_to_all(config) else "tokens needed"
        # uvicorn raises the signal that ended it once more, which is no failure.
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, _ignore)
        report(f"kqueue serves http://{address}:{listening.getsockname()[1]} ({who})")
        _Server(app).run([listening])


def _ignore(_signum: int, _frame: FrameType | None) -> None:
    """The signal has done its work."""


def _listen(host: str, port: int) -> socket.socket:
    try:
        [(family, kind, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        listening = socket.socket(family, kind)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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


class _Server(uvicorn.Server):
    """uvicorn that lets waiting requests answer when it is told to stop, instead of waiting for them."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
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
