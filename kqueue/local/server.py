"""The base class of the embedded servers: a directory, a lock on it, a child process, a unix socket."""

from __future__ import annotations

import os
import signal
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Self

from kqueue.errors import LocalFleetError
from kqueue.local.process import Child, Lock, drop_socket_directory, socket_directory, wait_until_ready


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
        """The server's address.

        Raises:
            LocalFleetError: the server does not run.
        """
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
        """Start the server and wait until it answers.

        Raises:
            LocalFleetError: the server program is missing, the directory is in use, or the server does not start. The
                message names the cause and a remedy.
        """
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
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8", "TZ": "UTC"}
