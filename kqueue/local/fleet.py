"""The one-machine fleet: embedded services, this host's workers, Flower and `kqueue serve`, under one owner."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import importlib
import importlib.util
import json
import logging
import os
import secrets
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, Self
from uuid import NAMESPACE_URL, UUID, uuid5

from pydantic import SecretStr

from kqueue.config import FLEET_FILE, Config
from kqueue.errors import DatabaseUnavailable, LocalFleetError, ServiceError
from kqueue.http import check_access, require_http
from kqueue.local.postgres import Postgres
from kqueue.local.process import (
    Child,
    Lock,
    bound_log,
    command_line,
    drop_socket_directory,
    socket_directory,
)
from kqueue.local.valkey import Valkey

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from kqueue.client import Client
    from kqueue.store.workers import LiveWorker

#: Seconds after which a part that is not up is reported as late, and again after each such time. It goes on starting.
_LATE_S: Final = 30.0
#: Seconds between checks of the parts.
_CHECK_S: Final = 0.5
#: Seconds for Flower and HTTP to end. A process that still imports needs some of them on a busy host.
_WEB_END_S: Final = 10.0
#: Seconds for evaluations in progress to finish at a warm stop, and to abort at a quick stop.
_WARM_S: Final = 60.0
_QUICK_S: Final = 20.0
#: Shortest and longest pause in seconds before a part that died is started again. The pause doubles at each death, and
#: begins again after a life of ``_LASTED_S`` seconds.
_PAUSE_S: Final = (1.0, 30.0)
_LASTED_S: Final = 60.0
#: The file of the unix socket on which HTTP is served.
_HTTP_SOCKET: Final = "http.sock"
#: Command prefix that runs a module. -P keeps a folder `workers` in the working directory from shadowing kqueue's.
_PYTHON: Final = (sys.executable, "-P", "-m")
#: The supervisor's module, and the module of each slot's worker process.
_SUPERVISOR: Final = "workers.fleet"
_WORKER: Final = "workers.start"


_log = logging.getLogger(__name__)


class _Part(Protocol):
    """A part that the fleet supervises."""

    def start(self) -> object: ...
    def alive(self) -> bool: ...
    def ready(self) -> bool: ...
    def last_words(self) -> str: ...


class LocalFleet:
    """A fleet on one machine, whose parts are children of this process.

    ::

        with LocalFleet(kqueue.config.load()) as fleet, fleet.client() as kq:
            kq.evaluate(...)

    Services whose URL is configured are used. Other services are embedded, with persistent data below ``config.home``,
    which only one fleet can use at a time. All parts end with the thread that starts them, even if this process is
    killed.
    """

    def __init__(
        self,
        config: Config,
        *,
        flower: bool = False,
        http: bool = False,
        durable: bool = True,
        fork: bool = False,
        report: Callable[[str], None] = _log.info,
    ) -> None:
        """Configure a fleet without starting anything.

        Args:
            config: the fleet's settings.
            flower, http: whether Flower, and `kqueue serve`, are started too.
            durable: whether the embedded database survives a power failure. False is for tests.
            fork: whether the supervisor, Flower and HTTP are forks of this process, which share its imports. Then this
                process must only own the fleet, and have no other thread.
            report: gets one line for each event: a part comes up, is late, dies or runs again.
        """
        self.config = config
        self.flower_url: str | None = None
        self.http_url: str | None = None
        self.http_socket: Path | None = None
        self._http_token: str | None = None
        self._flower_auth: str | None = None
        self._flower = flower
        self._http = http
        self._durable = durable
        self._fork = fork
        self._report = report
        self._parts: list[_Supervised] = []
        self._workers: _Workers | None = None
        self._engine: Engine | None = None
        self._exit = contextlib.ExitStack()

    def start(self) -> Self:
        """Start all parts, and wait until this host's slots are registered.

        Flower and HTTP start meanwhile, and go on starting if they are late.

        Raises:
            LocalFleetError: a part is missing or ends while it starts, or the home is in use. The message names it and
                shows the end of its log.
            ConfigError: the settings are invalid.
            DatabaseUnavailable, SchemaMismatch: a configured database cannot be used.
        """
        require_worker()
        home = self.config.home_path
        # Created first, so that errors in their settings are reported at once.
        flower = _Flower(self.config, home / "logs" / "flower.log") if self._flower else None
        http = _Http(self.config, home / "logs" / "http.log") if self._http else None
        webs: list[_Web] = [web for web in (flower, http) if web is not None]
        try:
            # Before the ports, because a running fleet of this home must be reported as such, not by its ports.
            self._exit.enter_context(Lock(home, "the one-machine fleet"))
            for web in webs:
                web.find_port(self._report)
            self.flower_url, self._flower_auth = (flower.url, flower.auth) if flower else (None, None)
            self.http_url = http and http.url
            (home / FLEET_FILE).unlink(missing_ok=True)
            if _others_judge(self.config.scratch):
                self._report(
                    "another fleet of this user runs on this machine: evaluations of both take turns on its devices. "
                    "`kqueue status` shows which process they wait for"
                )
            self._start_services(home)
            if self._fork:
                _load([_SUPERVISOR, *(module for web in webs for module in web.modules)])
            workers = self._start_workers(home)
            if http is not None:
                self._admit_owner(home)
            for web in webs:
                web.config, web.fork = self.config, self._fork
                self._exit.callback(web.stop)
                self._start_part(web.name, web)
            self._wait(workers)
            self._publish(home)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self, *, warm: bool = False) -> None:
        """Stop all parts, workers before the services that they need. A second call does nothing.

        Args:
            warm: wait up to a minute until evaluations in progress end. Otherwise they go back to the queue.
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
        """Return a client of this fleet, which the caller closes."""
        from kqueue.client import Client

        return Client(config=self.config)

    def slots(self) -> list[LiveWorker]:
        """Return the slots that are registered and alive, including slots of other hosts.

        Raises:
            LocalFleetError: the fleet does not run.
            DatabaseUnavailable: the database cannot be reached.
        """
        from kqueue.store import workers

        if self._engine is None:
            raise LocalFleetError("this fleet was not started, or was stopped: call this inside its `with` block")
        return workers.live(self._engine, within_s=self.config.live_s)

    def run_forever(self) -> None:
        """Keep all parts running until SIGINT, SIGTERM or SIGHUP, then stop them.

        After SIGTERM, evaluations in progress end. SIGINT, SIGHUP or a second signal aborts them, and they are judged
        again at the next start. SIGHUP has no effect if it is ignored, as under `nohup`. Call this from the main
        thread.
        """
        stops = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
        stops -= {signum for signum in stops if signal.getsignal(signum) is signal.SIG_IGN}
        signal.pthread_sigmask(signal.SIG_BLOCK, stops)
        try:
            # sigtimedwait, if interrupted as by Ctrl-Z and `fg`, can return a signal that was not sent.
            while not (pending := signal.sigpending() & stops):
                self.look()
                time.sleep(_CHECK_S)
            received = signal.sigwait(pending)
            self._report("stopping (once more to stop at once)" if received == signal.SIGTERM else "stopping")
        finally:
            before = {signum: signal.signal(signum, signal.default_int_handler) for signum in stops}
            signal.pthread_sigmask(signal.SIG_UNBLOCK, stops)
        try:
            self.stop(warm=received == signal.SIGTERM)
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def look(self) -> None:
        """Restart dead parts and rotate their logs, for owners that do not call :meth:`run_forever`.

        Call this about every half second from the thread that started the fleet, because parts end with their thread.
        """
        for one in self._parts:
            one.look()
        for log in (self.config.home_path / "logs").glob("*.log"):
            bound_log(log)

    def _start_part(self, name: str, part: _Part) -> _Supervised:
        one = _Supervised(name, part, self._report)
        one.start()
        self._parts.append(one)
        return one

    def _wait(self, workers: _Supervised) -> None:
        """Wait until the workers are ready, and all other parts are ready or late."""
        while True:
            missing = [one for one in self._parts if not one.came_up()]
            if workers not in missing and all(one.late for one in missing):
                return
            time.sleep(_CHECK_S / 2)

    def _start_services(self, home: Path) -> None:
        addresses: dict[str, SecretStr] = {}
        if self.config.database_url is None:
            postgres = Postgres(home / "postgres", durable=self._durable, log=home / "logs" / "postgres.log")
            self._exit.callback(postgres.stop)
            self._start_part("Postgres", postgres).came_up()
            addresses["database_url"] = SecretStr(postgres.url)
        if self.config.redis_url is None:
            valkey = Valkey(home / "valkey", log=home / "logs" / "valkey.log")
            self._exit.callback(valkey.stop)
            self._start_part("Valkey", valkey).came_up()
            addresses["redis_url"] = SecretStr(valkey.url)
        self.config = self.config.model_copy(update=addresses)

    def _start_workers(self, home: Path) -> _Supervised:
        from kqueue.store import schema
        from kqueue.store.engine import connect

        schema.upgrade(self.config.require_database())
        self._engine = connect(self.config.require_database(), application="kqueue-fleet", pool_size=1)
        self._exit.callback(self._engine.dispose)
        workers = _Workers(self.config, home / "logs" / "workers.log", self.slots, self._report)
        workers.fork = self._fork
        workers.forget_earlier()
        self._exit.callback(workers.stop)
        self._workers = workers
        return self._start_part("the worker fleet", workers)

    def _admit_owner(self, home: Path) -> None:
        """Create the owner's two credentials for HTTP: a unix socket, and a token for this run."""
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
        # The id is the same at every start, so this invalidates the former secret, even of a fleet that was killed.
        token_id = uuid5(NAMESPACE_URL, f"kqueue://{host}{home}")
        try:
            self._http_token = tokens.renew(
                engine, token_id, f"kqueue up on {host}: {home}"[:200], [tokens.Scope.PROBLEMS]
            )
        except DatabaseUnavailable as error:
            # A database login for workers of a remote fleet cannot create tokens. The socket needs none.
            if not lacks_right(error):
                raise
            return

        def revoke() -> None:
            # If the embedded database is gone, no server is left that would accept the token.
            with contextlib.suppress(ServiceError):
                tokens.revoke(engine, str(token_id))

        self._exit.callback(revoke)

    def _publish(self, home: Path) -> None:
        """Write the file from which this user's clients read the fleet's addresses, its token and Flower's password."""
        addresses = {
            "pid": os.getpid(),
            "database_url": self.config.require_database(),
            "redis_url": self.config.require_redis(),
            "flower_url": self.flower_url,
            "flower_auth": self._flower_auth,
            "url": self.http_url,
            "socket": self.http_socket and str(self.http_socket),
            "token": self._http_token,
            "gpu_fallback": self.config.gpu_fallback,
        }
        file, fresh = home / FLEET_FILE, home / (FLEET_FILE + ".new")
        fresh.unlink(missing_ok=True)
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as text:
            json.dump(addresses, text)
        self._exit.callback(file.unlink, missing_ok=True)
        fresh.replace(file)


class _Workers:
    """The supervisor of this host's worker processes, ``workers.fleet``."""

    def __init__(
        self, config: Config, log: Path, slots: Callable[[], list[LiveWorker]], report: Callable[[str], None]
    ) -> None:
        self.warm = False
        self.fork = False
        self._config = config
        self._log = log
        self._slots = slots
        self._report = report
        self._child: Child | None = None
        self._earlier: set[UUID] = set()
        self._registered = 0
        self._came = False

    def start(self) -> None:
        self._child = _start(
            (_SUPERVISOR,),
            self._config.environment(),
            log=self._log,
            # SIGINT stops it without waiting for evaluations.
            death_signal=signal.SIGINT,
            fork=self.fork,
        )

    def alive(self) -> bool:
        return self._child is not None and self._child.alive()

    def forget_earlier(self) -> None:
        """Ignore the slots that are registered now. A new worker can get the process id of a dead one of them."""
        self._earlier = {slot.id for slot in self._slots()}

    def ready(self) -> bool:
        """Return whether all slots have been registered once. Afterwards the supervisor restarts workers itself."""
        assert self._child is not None
        if not self._came:
            registered = {slot.pid for slot in self._slots() if slot.id not in self._earlier}
            # All workers are started before the first is registered. Other children are short-lived helpers.
            started = {pid for pid in self._child.children() if _WORKER in command_line(pid)}
            self._came = bool(started) and started <= registered
            if (count := len(started & registered)) > self._registered:
                self._registered = count
                self._report(f"{count} of {len(started)} workers ready")
        return self._came

    def last_words(self) -> str:
        return self._child.last_words() if self._child is not None else ""

    def stop(self) -> None:
        if self._child is not None:
            warm = [(signal.SIGTERM, _WARM_S)] if self.warm else []
            self._child.stop(*warm, (signal.SIGINT, _QUICK_S))


class _Web:
    """A part with an HTTP server."""

    name: str
    #: The path that answers as soon as the part works.
    asked: str
    #: The setting with its port.
    setting: str
    #: The module that it runs with its arguments, and the modules to import before a fork.
    words: tuple[str, ...]
    modules: tuple[str, ...]

    def __init__(self, config: Config, log: Path, host: str, port: int, fix: str) -> None:
        self.config = config
        self.fork = False
        self._log = log
        self._host = host
        self._port = port
        self._fix = fix
        self._child: Child | None = None

    @property
    def url(self) -> str:
        return f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{self._port}"

    def find_port(self, report: Callable[[str], None]) -> None:
        """Choose a free port if the configured one is 0, or if none is configured and the default one is in use."""
        try:
            self._port = _free_port(self._host, self._port)
        except OSError as error:
            if self.setting in self.config.model_fields_set or error.errno != errno.EADDRINUSE:
                raise LocalFleetError(
                    f"{self.name} cannot listen on {self._host}:{self._port} ({error.strerror}): choose another port "
                    f"with {self._fix} (0: any that is free), or go without it"
                ) from error
            taken, self._port = self._port, _free_port(self._host, 0)
            report(f"{self.name} uses port {self._port} because {taken} is in use. Choose another with {self._fix}")

    def environment(self) -> dict[str, str]:
        """Return its environment variables in addition to the settings. All users could read command-line arguments."""
        raise NotImplementedError

    def start(self) -> None:
        self._child = _start(
            self.words,
            self.config.environment() | self.environment(),
            log=self._log,
            # It has no state to save, and an interrupted Flower can wait for its own threads forever.
            death_signal=signal.SIGKILL,
            fork=self.fork,
        )

    def alive(self) -> bool:
        return self._child is not None and self._child.alive()

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop((signal.SIGTERM, _WEB_END_S))

    def last_words(self) -> str:
        return self._child.last_words() if self._child is not None else ""

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + self.asked, timeout=2) as answer:  # noqa: S310 http by construction
                return answer.status == 200
        except OSError:
            return False


class _Flower(_Web):
    """Flower on this fleet's broker."""

    name = "Flower"
    asked = "/healthcheck"
    setting = "flower_port"
    words = modules = ("kqueue.flower",)

    def __init__(self, config: Config, log: Path) -> None:
        if not has_flower():
            raise LocalFleetError("Flower is not installed: `pip install 'kqueue[server]'`, or go without it")
        given = config.flower_auth
        self.auth = given.get_secret_value() if given is not None else f"kqueue:{secrets.token_hex(16)}"
        super().__init__(config, log, config.flower_address, config.flower_port, "KQUEUE_FLOWER_PORT or --flower-port")

    def environment(self) -> dict[str, str]:
        return {
            "FLOWER_ADDRESS": self.config.flower_address,
            "FLOWER_PORT": str(self._port),
            "FLOWER_BASIC_AUTH": self.auth,
        }


class _Http(_Web):
    """`kqueue serve` for this fleet."""

    name = "HTTP"
    #: A static file, which needs no token and no database.
    asked = "/static/live.js"
    setting = "http_port"
    words, modules = ("kqueue", "serve"), ("kqueue.http.server", "kqueue.web.app")

    def __init__(self, config: Config, log: Path) -> None:
        require_http()
        check_access(config)
        super().__init__(config, log, config.http_address, config.http_port, "KQUEUE_HTTP_PORT or --http-port")

    def environment(self) -> dict[str, str]:
        return {"KQUEUE_HTTP_PORT": str(self._port)}


@dataclass
class _Supervised:
    """The start and the restarts of a part."""

    name: str
    part: _Part
    report: Callable[[str], None]
    pause_s: float = _PAUSE_S[0]
    #: Monotonic time of its last start.
    started: float = 0.0
    due: float | None = None
    up: bool = False
    #: Number of reports that it is late.
    late: int = 0
    died: bool = False

    def start(self) -> None:
        self.started, self.up, self.late = time.monotonic(), False, 0
        self.part.start()

    def came_up(self) -> bool:
        """Return whether it works. Report when it comes up or is late. Raise LocalFleetError if it has ended."""
        if self.up:
            return True
        took_s = time.monotonic() - self.started
        if not self.part.alive():
            raise LocalFleetError(f"{self.name} {self.part.last_words()}")
        if self.part.ready():
            self.up = True
            self.report(f"{self.name} runs again" if self.died else f"{self.name} is up, after {took_s:.1f} s")
        elif took_s > (self.late + 1) * _LATE_S:
            self.late += 1
            self.report(f"{self.name} is not up after {took_s:.0f} s and goes on starting")
        return self.up

    def look(self) -> None:
        now = time.monotonic()
        if self.part.alive():
            with contextlib.suppress(LocalFleetError):  # it died just now
                self.came_up()
        elif self.due is None:
            if now - self.started > _LASTED_S:
                self.pause_s = _PAUSE_S[0]
            self.due, self.died = now + self.pause_s, True
            self.report(f"{self.name} died and is started again in {self.pause_s:.0f} s")
            self.pause_s = min(2 * self.pause_s, _PAUSE_S[1])
        elif now >= self.due:
            self.due = None
            try:
                self.start()
            except LocalFleetError as error:
                self.report(str(error))


def _load(modules: list[str]) -> None:
    """Import the modules of forks, and freeze them, so that garbage collection does not copy their memory."""
    if not sys.flags.safe_path:
        del sys.path[0]  # see _PYTHON
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()


def _start(
    words: tuple[str, ...], settings: Mapping[str, str], *, log: Path, death_signal: signal.Signals, fork: bool
) -> Child:
    """Start ``python -m WORDS`` of kqueue with this process's environment and the given settings."""

    def run() -> Any:
        sys.argv = [*words]
        return importlib.import_module("kqueue.cli" if words[0] == "kqueue" else words[0]).main()

    command, environment = [*_PYTHON, *words], {**os.environ, **settings}
    return Child(command, log=log, environment=environment, death_signal=death_signal, run=run if fork else None)


def _others_judge(scratch: Path) -> bool:
    """Return whether another fleet uses the scratch directory, and so the same locks of devices."""
    for directory in scratch.glob("fleet-*"):
        with contextlib.suppress(OSError):  # it is gone
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            finally:
                os.close(descriptor)
    return False


def worker_command() -> list[str]:
    """Return the command of this host's supervisor, which runs in the foreground with settings in its environment."""
    return [*_PYTHON, _SUPERVISOR]


def require_worker() -> None:
    """Raise a LocalFleetError if workers cannot run in this installation because torch is missing."""
    if importlib.util.find_spec("torch") is None:
        raise LocalFleetError("workers need torch, which is not installed here: `pip install 'kqueue[worker]'`")


def has_flower() -> bool:
    """Return True if Flower is installed."""
    return importlib.util.find_spec("flower") is not None


def _free_port(host: str, port: int) -> int:
    """Return ``port``, or any free one if it is 0. Raise an OSError if it is not free."""
    [(family, kind, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        return probe.getsockname()[1]
