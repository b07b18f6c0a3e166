"""The parts of the one-machine fleet: its supervisor of workers, Flower and `kqueue serve`, and their restarts."""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import importlib.util
import os
import secrets
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol
from uuid import UUID

from kqueue import program
from kqueue.config import Config
from kqueue.errors import LocalFleetError
from kqueue.http import check_access, require_http
from kqueue.local.process import Child, command_line
from kqueue.text import one_line

if TYPE_CHECKING:
    from kqueue.store.workers import LiveWorker

#: Seconds after which a part that is not up is reported as late, and again after each such time. It goes on starting.
_LATE_S: Final = 30.0
#: Seconds for Flower and HTTP to end. A process that still imports needs some of them on a busy host.
_WEB_END_S: Final = 10.0
#: Seconds for evaluations in progress to finish at a warm stop, and to abort at a quick stop.
_WARM_S: Final = 60.0
_QUICK_S: Final = 20.0
#: Shortest and longest pause in seconds before a part that died is started again. The pause doubles at each death, and
#: begins again after a life of ``_LASTED_S`` seconds.
_PAUSE_S: Final = (1.0, 30.0)
_LASTED_S: Final = 60.0
#: The supervisor's module, and the module of each slot's worker process.
_SUPERVISOR: Final = "workers.fleet"
_WORKER: Final = "workers.start"


class Part(Protocol):
    """A part that the fleet supervises."""

    def start(self) -> object: ...
    def alive(self) -> bool: ...
    def ready(self) -> bool: ...
    def last_words(self) -> str: ...


class _ChildPart:
    """A part that is a process ``python -m WORDS`` with this process's environment and the settings."""

    #: The module that it runs, with its arguments.
    words: ClassVar[tuple[str, ...]]
    #: The modules to import before a fork.
    modules: ClassVar[tuple[str, ...]]
    #: True if it gets the secrets of `kqueue serve`.
    serves: ClassVar[bool] = False
    death_signal: ClassVar[signal.Signals]

    def __init__(self, config: Config, log: Path) -> None:
        self.config = config
        #: True for a fork of this process, which has this process's secrets.
        self.fork = False
        self._log = log
        self._child: Child | None = None

    def environment(self) -> dict[str, str]:
        """Return its environment variables in addition to the settings. All users could read command-line arguments."""
        return {}

    def start(self) -> None:
        def run() -> Any:
            sys.argv = [*self.words]
            return importlib.import_module(self.modules[0]).main()

        # A fork keeps the memory and the first environment of this process.
        forks = self.fork and (self.serves or not self.config.has_servers_secrets)
        self._child = Child(
            [*program.PYTHON, *self.words],
            log=self._log,
            environment={**os.environ, **self.config.environment(serves=self.serves), **self.environment()},
            death_signal=self.death_signal,
            run=run if forks else None,
        )

    def alive(self) -> bool:
        return self._child is not None and self._child.alive()

    def last_words(self) -> str:
        return self._child.last_words() if self._child is not None else ""


class Workers(_ChildPart):
    """The supervisor of this host's worker processes, ``workers.fleet``."""

    words = modules = (_SUPERVISOR,)
    #: SIGINT stops it without waiting for evaluations.
    death_signal = signal.SIGINT

    def __init__(
        self, config: Config, log: Path, slots: Callable[[], list[LiveWorker]], report: Callable[[str], None]
    ) -> None:
        super().__init__(config, log)
        self.warm = False
        self._slots = slots
        self._report = report
        self._earlier: set[UUID] = set()
        self._registered = 0
        self._came = False

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

    def stop(self) -> None:
        if self._child is not None:
            warm = [(signal.SIGTERM, _WARM_S)] if self.warm else []
            self._child.stop(*warm, (signal.SIGINT, _QUICK_S))


class Web(_ChildPart):
    """A part with an HTTP server."""

    name: ClassVar[str]
    #: The path that answers as soon as the part works.
    asked: ClassVar[str]
    #: The setting with its port.
    setting: ClassVar[str]
    #: It has no state to save, and an interrupted Flower can wait for its own threads forever.
    death_signal = signal.SIGKILL

    def __init__(self, config: Config, log: Path, host: str, port: int, fix: str) -> None:
        super().__init__(config, log)
        self._host = host
        self._port = port
        self._fix = fix

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

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop((signal.SIGTERM, _WEB_END_S))

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + self.asked, timeout=2) as answer:  # noqa: S310 http by construction
                return answer.status == 200
        except OSError:
            return False


class Flower(Web):
    """Flower on this fleet's broker."""

    name = "Flower"
    asked = "/healthcheck"
    setting = "flower_port"
    words = modules = ("kqueue.flower",)

    def __init__(self, config: Config, log: Path) -> None:
        if not has_flower():
            raise LocalFleetError("Flower is not installed: `pip install 'kqueue[fleet]'`, or go without it")
        given = config.flower_auth
        self.auth = given.get_secret_value() if given is not None else f"kqueue:{secrets.token_hex(16)}"
        super().__init__(config, log, config.flower_address, config.flower_port, "KQUEUE_FLOWER_PORT or --flower-port")

    def environment(self) -> dict[str, str]:
        return {
            "FLOWER_ADDRESS": self.config.flower_address,
            "FLOWER_PORT": str(self._port),
            "FLOWER_BASIC_AUTH": self.auth,
        }


class Http(Web):
    """`kqueue serve` for this fleet."""

    name = "HTTP"
    #: A static file, which needs no token and no database.
    asked = "/static/live.js"
    setting = "http_port"
    words, modules = ("kqueue", "serve"), ("kqueue.cli", "kqueue.http.server", "kqueue.web.app")
    serves = True

    def __init__(self, config: Config, log: Path) -> None:
        require_http()
        check_access(config)
        super().__init__(config, log, config.http_address, config.http_port, "KQUEUE_HTTP_PORT or --http-port")

    def environment(self) -> dict[str, str]:
        return {"KQUEUE_HTTP_PORT": str(self._port)}


@dataclass
class Supervised:
    """The start and the restarts of a part."""

    name: str
    part: Part
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
            self.report(f"{self.name} is not up after {took_s:.0f} s and goes on starting{self._last_line()}")
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
            self.report(f"{self.name} died and is started again in {self.pause_s:.0f} s{self._last_line()}")
            self.pause_s = min(2 * self.pause_s, _PAUSE_S[1])
        elif now >= self.due:
            self.due = None
            try:
                self.start()
            except LocalFleetError as error:
                self.report(str(error))

    def _last_line(self) -> str:
        line = one_line(self.part.last_words().rpartition("\n")[2])
        return f". Its log ends with: {line[:300]}" if line else ""


def load_modules(modules: list[str]) -> None:
    """Import the modules of forks, and freeze them, so that garbage collection does not copy their memory."""
    if not sys.flags.safe_path:
        del sys.path[0]  # the working directory or the script's folder
    program.load("workers", program.folder("workers"))
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()


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


def require_worker(extra: str = "worker") -> None:
    """Raise a LocalFleetError that names ``extra`` if workers cannot run here because torch is missing."""
    if importlib.util.find_spec("torch") is None:
        raise LocalFleetError(f"workers need torch, which is not installed here: `pip install 'kqueue[{extra}]'`")


def worker_command() -> list[str]:
    """Return the command of this host's supervisor, which runs in the foreground with settings in its environment."""
    return [*program.PYTHON, *Workers.words]
