"""The one-machine fleet: embedded services, this host's workers, Flower and `kqueue serve`, under one owner."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self
from uuid import NAMESPACE_URL, uuid5

from pydantic import SecretStr

from kqueue.config import FLEET_FILE, Config
from kqueue.errors import DatabaseUnavailable, LocalFleetError, ServiceError
from kqueue.local.parts import Flower, Http, Part, Supervised, Web, Workers, load_modules, require_worker
from kqueue.local.process import Lock, bound_log, drop_socket_directory, socket_directory
from kqueue.local.servers import Postgres, Valkey

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from kqueue.client import Client
    from kqueue.store.workers import LiveWorker

#: Seconds between checks of the parts.
_CHECK_S: Final = 0.5
#: The file of the unix socket on which HTTP is served.
_HTTP_SOCKET: Final = "http.sock"

_log = logging.getLogger(__name__)


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
        self._parts: list[Supervised] = []
        self._workers: Workers | None = None
        self._engine: Engine | None = None
        self._exit = contextlib.ExitStack()

    def start(self) -> Self:
        """Start all parts, and wait until this host's slots are registered.

        Flower and HTTP start meanwhile, and go on starting if they are late. Raise LocalFleetError if a part is missing
        or ends while it starts, or the home is in use. The message names it and shows the end of its log.
        """
        home = self.config.home_path
        # Created and checked first, so that a missing part or a wrong setting is reported before the home is created.
        require_worker("fleet")
        postgres = Postgres(home / "postgres", durable=self._durable, log=home / "logs" / "postgres.log")
        valkey = Valkey(home / "valkey", log=home / "logs" / "valkey.log")
        if self.config.database_url is None:
            postgres.check()
        if self.config.redis_url is None:
            valkey.check()
        flower = Flower(self.config, home / "logs" / "flower.log") if self._flower else None
        http = Http(self.config, home / "logs" / "http.log") if self._http else None
        webs: list[Web] = [web for web in (flower, http) if web is not None]
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
            self._start_services(postgres, valkey)
            if self._fork:
                load_modules([*Workers.modules, *(module for web in webs for module in web.modules)])
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

        A ``warm`` stop waits up to a minute until evaluations in progress end. Otherwise they go back to the queue.
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
        """Return the slots that are registered and alive, including slots of other hosts."""
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

    def _start_part(self, name: str, part: Part) -> Supervised:
        one = Supervised(name, part, self._report)
        one.start()
        self._parts.append(one)
        return one

    def _wait(self, workers: Supervised) -> None:
        """Wait until the workers are ready, and all other parts are ready or late."""
        while True:
            missing = [one for one in self._parts if not one.came_up()]
            if workers not in missing and all(one.late for one in missing):
                return
            time.sleep(_CHECK_S / 2)

    def _start_services(self, postgres: Postgres, valkey: Valkey) -> None:
        addresses: dict[str, SecretStr] = {}
        if self.config.database_url is None:
            self._exit.callback(postgres.stop)
            self._start_part("Postgres", postgres).came_up()
            addresses["database_url"] = SecretStr(postgres.url)
        if self.config.redis_url is None:
            self._exit.callback(valkey.stop)
            self._start_part("Valkey", valkey).came_up()
            addresses["redis_url"] = SecretStr(valkey.url)
        self.config = self.config.model_copy(update=addresses)

    def _start_workers(self, home: Path) -> Supervised:
        from kqueue.store import schema
        from kqueue.store.engine import connect

        schema.upgrade(self.config.require_database())
        self._engine = connect(self.config.require_database(), application="kqueue-fleet", pool_size=1)
        self._exit.callback(self._engine.dispose)
        workers = Workers(self.config, home / "logs" / "workers.log", self.slots, self._report)
        workers.fork = self._fork
        workers.forget_earlier()
        self._exit.callback(workers.stop)
        self._workers = workers
        return self._start_part("the worker fleet", workers)

    def _admit_owner(self, home: Path) -> None:
        """Create the owner's two credentials for HTTP, a unix socket and a token for this run, and receipts' key."""
        from kqueue import receipts
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
        receipt_key = (self.config.receipt_key or home / "receipts.pem").expanduser().absolute()
        if not receipt_key.exists():
            receipts.create_key(receipt_key)
        self.config = self.config.model_copy(update={"http_socket": self.http_socket, "receipt_key": receipt_key})
        host = socket.gethostname()
        # The id is the same at every start, so this invalidates the former secret, even of a fleet that was killed.
        token_id = uuid5(NAMESPACE_URL, f"kqueue://{host}{home}")
        try:
            self._http_token = tokens.renew(
                engine, token_id, f"kqueue up on {host}: {home}"[:200], [tokens.Scope.PROBLEMS, *tokens.WIDE]
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
            "pid": str(os.getpid()),
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
