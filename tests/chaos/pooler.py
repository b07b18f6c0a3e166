"""PgBouncer in front of an embedded Postgres, where the program is installed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final, Self
from urllib.parse import quote

from kqueue.local import servers
from kqueue.local.process import Child, wait_until_ready
from kqueue.local.servers import Postgres

_SETTINGS: Final = """
[databases]
kqueue = host={postgres} port=5432 user=postgres

[pgbouncer]
listen_addr =
unix_socket_dir = {here}
listen_port = {port}
auth_type = any
pool_mode = {mode}
max_client_conn = 5000
default_pool_size = {size}
# Postgres' connections keep what they have learned about the schema: they must live long.
server_idle_timeout = 3600
# kqueue sends its limits in this one, which PgBouncer does not know: they are set for the database instead.
ignore_startup_parameters = options
logfile = {here}/log
"""
_PORT: Final = 6432


class Pooler:
    """A pooler that runs inside the `with` block, on a unix socket."""

    def __init__(self, postgres: Postgres, place: Path, *, mode: str = "session", size: int = 20) -> None:
        """Take the server, a folder to create, the pool mode, and the limit of server connections.

        Raises:
            FileNotFoundError: the program is not installed.
        """
        program = shutil.which("pgbouncer", path=os.pathsep.join([os.environ["PATH"], "/usr/sbin"]))
        if program is None:
            raise FileNotFoundError("pgbouncer is not installed")
        place.mkdir()
        self._place = place
        settings = place / "pgbouncer.ini"
        settings.write_text(_SETTINGS.format(postgres=postgres._sockets, here=place, port=_PORT, mode=mode, size=size))
        # Like the embedded server, it runs without root's identity but needs access to root's files.
        self._command = [*servers._prefix("--pdeathsig=KILL"), program, str(settings)]
        self._child: Child | None = None

    @property
    def url(self) -> str:
        """Return the database's URL through the pooler."""
        return f"postgresql+psycopg://postgres@/kqueue?host={quote(str(self._place))}&port={_PORT}"

    @property
    def pid(self) -> int:
        """Return the pooler's pid."""
        assert self._child is not None
        return self._child.pid

    def __enter__(self) -> Self:
        self._child = Child(self._command, log=self._place / "out", environment=dict(os.environ))
        listening = self._place / f".s.PGSQL.{_PORT}"
        wait_until_ready(self._child, "PgBouncer", listening.exists, 30.0)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._child is not None
        self._child.stop()
