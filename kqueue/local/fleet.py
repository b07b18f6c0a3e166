"""The one-machine fleet: embedded services, this host's workers, Flower and `kqueue serve`, under one owner."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, Self
from uuid import NAMESPACE_URL, uuid5

from pydantic import SecretStr

from kqueue.config import FLEET_FILE, Config
from kqueue.errors import ConfigError, DatabaseUnavailable, LocalFleetError, ServiceError
from kqueue.http import check_access, require_http
from kqueue.local.postgres import Postgres
from kqueue.local.process import (
    Child,
    Lock,
    bound_log,
    command_line,
    drop_socket_directory,
    socket_directory,
    wait_until_ready,
)
from kqueue.local.valkey import Valkey

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from kqueue.client import Client
    from kqueue.store.workers import LiveWorker

#: A cold import of torch in every worker of a busy host.
_READY_S: Final = 180.0
_WEB_S: Final = 30.0
#: How long evaluations in progress may take where they are waited for, and how long they may take to break off.
_WARM_S: Final = 60.0
_QUICK_S: Final = 20.0
#: Pause before a part that died is started again: doubled while it keeps dying, forgotten when it lasts.
_PAUSE_S: Final = (1.0, 30.0)
_LASTED_S: Final = 60.0
#: The file of the unix socket on which HTTP is served.
_HTTP_SOCKET: Final = "http.sock"
#: The module that the supervisor runs for each slot.
_WORKER: Final = "workers.start"


class _Part(Protocol):
    """A part that the fleet supervises."""

    def start(self) -> object: ...
    def alive(self) -> bool: ...


class LocalFleet:
    """Everything that a fleet on one machine consists of, as children of this process.

    ::

        with LocalFleet(kqueue.config.load()) as fleet, fleet.client() as kq:
            kq.evaluate(...)

    Services whose URL the settings give are used as they are; the others are embedded, with their data below
    ``config.home``, where they last. One fleet at a time may use a home. All that was started is gone at the
    end, whichever way this process ends: it all ends with the thread that starts it.
    """

    def __init__(self, config: Config, *, flower: bool = False, http: bool = False, durable: bool = True) -> None:
        """Name the settings; nothing is started yet.

        Args:
            config: the fleet's settings.
            flower: whether Flower is started too.
            http: whether `kqueue serve` is started too.
            durable: whether the embedded database survives a power failure; False is for tests.
        """
        self.config = config
        self.flower_url: str | None = None
        self.http_url: str | None = None
        self.http_socket: Path | None = None
        self._http_token: str | None = None
        self._flower = flower
        self._http = http
        self._durable = durable
        self._parts: dict[str, _Part] = {}
        self._workers: _Workers | None = None
        self._engine: Engine | None = None
        self._exit = contextlib.ExitStack()

    def start(self) -> Self:
        """Start everything and wait until this host's slots are registered.

        Raises:
            LocalFleetError: a part is missing or does not come up, or the home is in use; the message says
                which and shows the end of its log.
            ConfigError: settings that cannot work.
            DatabaseUnavailable, SchemaMismatch: a configured database that cannot be used.
        """
        require_worker()
        home = self.config.home_path
        # Made first: what is wrong with its settings is known at once.
        flower = _Flower(self.config, home / "logs" / "flower.log") if self._flower else None
        http = _Http(self.config, home / "logs" / "http.log") if self._http else None
        try:
            self._exit.enter_context(Lock(home, "the one-machine fleet"))
            (home / FLEET_FILE).unlink(missing_ok=True)
            self._start_services(home)
            self._start_workers(home)
            if http is not None:
                self._admit_owner(home)
            for web in (flower, http):
                if web is not None:
                    self._exit.callback(web.stop)
                    web.config = self.config
                    web.start()
                    self._parts[web.name] = web
            self.flower_url = flower and flower.url
            self.http_url = http and http.url
            self._publish(home)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self, *, warm: bool = False) -> None:
        """Stop everything, workers before the services that they need; stopping twice is no error.

        Args:
            warm: let evaluations in progress end, for up to a minute; else they go back to the queue.
        """
        if self._workers is not None:
            self._workers.warm = warm
        self._exit.close()
        self._parts.clear()
        self._workers = self._engine = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def client(self) -> Client:
        """A client of this fleet; the caller closes it."""
        from kqueue.client import Client

        return Client(config=self.config)

    def slots(self) -> list[LiveWorker]:
        """The slots that are registered and alive, those of other hosts included.

        Raises:
            LocalFleetError: the fleet does not run.
            DatabaseUnavailable: the database cannot be reached.
        """
        from kqueue.store import workers

        if self._engine is None:
            raise LocalFleetError("this fleet was not started, or was stopped: ask inside its `with` block")
        return workers.live(self._engine, within_s=self.config.lease_s)

    def run_forever(self, report: Callable[[str], None]) -> None:
        """Keep all parts running until SIGINT, SIGTERM or SIGHUP comes, then stop everything.

        SIGTERM lets evaluations in progress end; a further signal, like SIGINT and SIGHUP, breaks them off and
        they are done again at the next start. Call it from the main thread.

        Args:
            report: is given one line for whatever happens.
        """
        stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        signal.pthread_sigmask(signal.SIG_BLOCK, stops)
        try:
            look = self.supervisor(report)
            while (received := signal.sigtimedwait(stops, 0.5)) is None:
                look()
            report("stopping; once more to stop at once" if received.si_signo == signal.SIGTERM else "stopping")
        finally:
            before = {signum: signal.signal(signum, signal.default_int_handler) for signum in stops}
            signal.pthread_sigmask(signal.SIG_UNBLOCK, stops)
        try:
            self.stop(warm=received.si_signo == signal.SIGTERM)
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def supervisor(self, report: Callable[[str], None]) -> Callable[[], None]:
        """Return a function that restarts dead parts and bounds their logs, for owners that do not :meth:`run_forever`.

        Call it about every half second, always from the thread that started the fleet: parts end with it.

        Args:
            report: is given one line for whatever happens.
        """
        supervised = [_Supervised(name, part) for name, part in self._parts.items()]

        def look() -> None:
            for one in supervised:
                one.look(report)
            for log in (self.config.home_path / "logs").glob("*.log"):
                bound_log(log)

        return look

    def _start_services(self, home: Path) -> None:
        addresses: dict[str, SecretStr] = {}
        if self.config.database_url is None:
            log = home / "logs" / "postgres.log"
            postgres = self._exit.enter_context(Postgres(home / "postgres", durable=self._durable, log=log))
            self._parts["Postgres"] = postgres
            addresses["database_url"] = SecretStr(postgres.url)
        if self.config.redis_url is None:
            valkey = self._exit.enter_context(Valkey(home / "valkey", log=home / "logs" / "valkey.log"))
            self._parts["Valkey"] = valkey
            addresses["redis_url"] = SecretStr(valkey.url)
        self.config = self.config.model_copy(update=addresses)

    def _start_workers(self, home: Path) -> None:
        from kqueue.store import schema
        from kqueue.store.engine import connect

        workers = _Workers(self.config, home / "logs" / "workers.log")
        self._exit.callback(workers.stop)
        self._workers = workers
        # Its imports take longer than the migration, for which it waits.
        child = workers.start()
        schema.upgrade(self.config.require_database())
        self._engine = connect(self.config.require_database(), application="kqueue-fleet", pool_size=1)
        self._exit.callback(self._engine.dispose)
        # A process id may be used again while the row of the life that had it before still looks alive.
        earlier = {slot.id for slot in self.slots()}

        def ready() -> bool:
            # All are started before the first is registered.
            registered = {slot.pid for slot in self.slots() if slot.id not in earlier}
            # Beside workers it has helpers, which come and go.
            started = {pid for pid in child.children() if _WORKER in command_line(pid)}
            return bool(started) and started <= registered

        wait_until_ready(child, "the worker fleet", ready, _READY_S, every_s=0.1)
        self._parts["the worker fleet"] = workers

    def _admit_owner(self, home: Path) -> None:
        """Make the two credentials of the fleet's owner over HTTP: a unix socket, and a token for this run."""
        from kqueue.store import tokens
        from kqueue.store.engine import lacks_right

        assert self._engine is not None
        engine = self._engine
        if self.config.http_socket is not None:
            self.http_socket = self.config.http_socket.expanduser().absolute()
        else:
            sockets = socket_directory(home, _HTTP_SOCKET)
            self._exit.callback(drop_socket_directory, sockets, home)
            self.http_socket = sockets / _HTTP_SOCKET
        self.config = self.config.model_copy(update={"http_socket": self.http_socket})
        host = socket.gethostname()
        # The same at every start: a former secret ends here, even that of a fleet that was killed.
        token_id = uuid5(NAMESPACE_URL, f"kqueue://{host}{home}")
        try:
            self._http_token = tokens.renew(
                engine, token_id, f"kqueue up on {host}: {home}"[:200], [tokens.Scope.PROBLEMS]
            )
        except DatabaseUnavailable as error:
            # A login that runs workers for a fleet elsewhere makes no tokens; the socket needs none.
            if not lacks_right(error):
                raise
            return

        def revoke() -> None:
            # With an embedded database that is gone, nobody is left who would take the token.
            with contextlib.suppress(ServiceError):
                tokens.revoke(engine, str(token_id))

        self._exit.callback(revoke)

    def _publish(self, home: Path) -> None:
        """Tell clients of this user where the fleet is, and give them its token."""
        known = {
            "pid": os.getpid(),
            "database_url": self.config.require_database(),
            "redis_url": self.config.require_redis(),
            "flower_url": self.flower_url,
            "url": self.http_url,
            "socket": self.http_socket and str(self.http_socket),
            "token": self._http_token,
            "gpu_fallback": self.config.gpu_fallback,
        }
        file, fresh = home / FLEET_FILE, home / (FLEET_FILE + ".new")
        fresh.unlink(missing_ok=True)
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as text:
            json.dump(known, text)
        self._exit.callback(file.unlink, missing_ok=True)
        fresh.replace(file)


class _Workers:
    """The supervisor of this host's worker processes, ``workers.fleet``."""

    def __init__(self, config: Config, log: Path) -> None:
        self.warm = False
        self._config = config
        self._log = log
        self._child: Child | None = None

    def start(self) -> Child:
        self._child = Child(
            worker_command(),
            log=self._log,
            environment=dict(os.environ) | self._config.environment(),
            # What it does with SIGINT is to stop without waiting for evaluations.
            death_signal=signal.SIGINT,
        )
        return self._child

    def alive(self) -> bool:
        return self._child is not None and self._child.alive()

    def stop(self) -> None:
        if self._child is not None:
            warm = [(signal.SIGTERM, _WARM_S)] if self.warm else []
            self._child.stop(*warm, (signal.SIGINT, _QUICK_S))


class _Web:
    """A part that people and programs reach by HTTP."""

    name: str
    #: What answers as soon as the part works.
    ready: str

    def __init__(self, config: Config, log: Path, host: str, port: int, fix: str) -> None:
        self.config = config
        self._log = log
        self._port = _free_port(self.name, host, port, fix)
        self._child: Child | None = None
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._port}"

    def command(self) -> list[str]:
        """Return the command, which stays in the foreground."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """Return its environment beside the fleet's settings. Every user of the machine could read arguments."""
        raise NotImplementedError

    def start(self) -> None:
        self._child = Child(
            [sys.executable, "-P", "-m", *self.command()],
            log=self._log,
            environment=dict(os.environ) | self.config.environment() | self.environment(),
            # It keeps nothing; and Flower, stopped at a bad moment, waits for its own threads for ever.
            death_signal=signal.SIGKILL,
        )
        wait_until_ready(self._child, self.name, self._answers, _WEB_S, every_s=0.05)

    def alive(self) -> bool:
        return self._child is not None and self._child.alive()

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop((signal.SIGTERM, 2.0))

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + self.ready, timeout=5) as answer:  # noqa: S310 http by construction
                return answer.status == 200
        except OSError:
            return False


class _Flower(_Web):
    """Flower on this fleet's broker."""

    name = "Flower"
    ready = "/healthcheck"

    def __init__(self, config: Config, log: Path) -> None:
        if not has_flower():
            raise LocalFleetError("Flower is not installed: `pip install 'kqueue[server]'`, or go without it")
        host = config.flower_address
        if config.flower_auth is None and host not in {"127.0.0.1", "::1", "localhost"}:
            raise ConfigError(
                f"KQUEUE_FLOWER_ADDRESS: {host} is not loopback, and Flower would answer everybody: "
                "set KQUEUE_FLOWER_AUTH to user:password"
            )
        super().__init__(config, log, host, config.flower_port, "KQUEUE_FLOWER_PORT or --flower-port")

    def command(self) -> list[str]:
        return ["celery", "-A", "kqueue.broker_app", "flower"]

    def environment(self) -> dict[str, str]:
        flower = {"FLOWER_ADDRESS": self.config.flower_address, "FLOWER_PORT": str(self._port)}
        if self.config.flower_auth is not None:
            flower["FLOWER_BASIC_AUTH"] = self.config.flower_auth.get_secret_value()
        return flower


class _Http(_Web):
    """`kqueue serve` for this fleet."""

    name = "HTTP"
    ready = "/openapi.json"

    def __init__(self, config: Config, log: Path) -> None:
        require_http()
        check_access(config)
        super().__init__(config, log, config.http_address, config.http_port, "KQUEUE_HTTP_PORT or --http-port")

    def command(self) -> list[str]:
        return ["kqueue", "serve"]

    def environment(self) -> dict[str, str]:
        return {"KQUEUE_HTTP_PORT": str(self._port)}


@dataclass
class _Supervised:
    """A part that is started again when it dies."""

    name: str
    part: _Part
    pause_s: float = _PAUSE_S[0]
    started: float = 0.0
    due: float | None = None

    def look(self, report: Callable[[str], None]) -> None:
        now = time.monotonic()
        if self.part.alive():
            return
        if self.due is None:
            if now - self.started > _LASTED_S:
                self.pause_s = _PAUSE_S[0]
            self.due = now + self.pause_s
            report(f"{self.name} died; it is started again in {self.pause_s:.0f} s")
            self.pause_s = min(2 * self.pause_s, _PAUSE_S[1])
        elif now >= self.due:
            self.due, self.started = None, now
            try:
                self.part.start()
            except LocalFleetError as error:
                report(str(error))
            else:
                report(f"{self.name} runs again")


def worker_command() -> list[str]:
    """Return the command of this host's workers, which stays in the foreground. Settings come by the environment."""
    # -P: a folder named `workers` where the user stands is not ours.
    return [sys.executable, "-P", "-m", "workers.fleet"]


def require_worker() -> None:
    """Return if workers can run in this installation.

    Raises:
        LocalFleetError: they need torch, and it is not there.
    """
    if importlib.util.find_spec("torch") is None:
        raise LocalFleetError("workers need torch, which is not installed here: `pip install 'kqueue[worker]'`")


def has_flower() -> bool:
    """Return True if Flower is installed."""
    return importlib.util.find_spec("flower") is not None


def _free_port(what: str, host: str, port: int, fix: str) -> int:
    """``port`` if nobody listens there, or any free one where it is 0."""
    try:
        [(family, kind, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return probe.getsockname()[1]
    except OSError as error:
        raise LocalFleetError(
            f"{what} cannot listen on {host}:{port} ({error.strerror}): choose another port with {fix} (0: any that "
            "is free), or go without it"
        ) from error
