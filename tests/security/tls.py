"""A TLS proxy for a server without TLS, like stunnel, in a thread."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Self

import trustme

#: Postgres' requests for TLS and for GSSAPI, 8 bytes each, which precede all other messages.
_SSL_REQUEST = (8).to_bytes(4) + (80877103).to_bytes(4)
_GSS_REQUEST = (8).to_bytes(4) + (80877104).to_bytes(4)


class Door:
    """Accepts connections on a loopback port and forwards their plain text to ``behind``."""

    def __init__(
        self, behind: Callable[[], socket.socket], certificate: trustme.LeafCert | None, *, postgres: bool
    ) -> None:
        """Take the server. Without a certificate there is no TLS, for which clients of Postgres ask first."""
        self._behind = behind
        self._postgres = postgres
        self._context: ssl.SSLContext | None = None
        if certificate is not None:
            self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            certificate.configure_cert(self._context)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        #: Number of connections over TLS that were forwarded.
        self.passed = 0

    def __enter__(self) -> Self:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._pass, args=(connection,), daemon=True).start()

    def _pass(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as open_now:
            client: socket.socket = open_now.enter_context(connection)
            first = b""
            if self._postgres:
                first = _exactly(client, 8)
                while first in {_SSL_REQUEST, _GSS_REQUEST}:
                    if first == _SSL_REQUEST and self._context is not None:
                        client.sendall(b"S")
                        first = b""
                        break
                    client.sendall(b"N")
                    first = _exactly(client, 8)
            if self._context is not None:
                if first:
                    return  # connections without TLS are refused
                client = open_now.enter_context(self._context.wrap_socket(client, server_side=True))
                self.passed += 1
            server = open_now.enter_context(self._behind())
            server.sendall(first)
            _pump(client, server)


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = connection.recv(count - len(found))
        if not part:
            raise OSError("closed")
        found += part
    return found


def _pump(one: Any, other: Any) -> None:
    while True:
        # The socket does not show bytes that TLS has already read.
        ready = [s for s in (one, other) if isinstance(s, ssl.SSLSocket) and s.pending()]
        ready = ready or wait([one, other])
        for source in ready:
            data = source.recv(1 << 16)
            if not data:
                return
            (other if source is one else one).sendall(data)


def unix(path: Path) -> Callable[[], socket.socket]:
    """Return a function that connects to a unix socket."""

    def connect() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(path))
        return connection

    return connect


def tcp(port: int) -> Callable[[], socket.socket]:
    """Return a function that connects to a loopback port."""
    return lambda: socket.create_connection(("127.0.0.1", port))
