"""What the embedded servers have in common: a directory, a lock on it, a child process, a unix socket."""

from __future__ import annotations

import os
import signal
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Self

from kqueue.errors import LocalFleetError
from kqueue.local.process import Child, Lock, drop_socket_directory, socket_directory, wait_until_ready


class Server(ABC):
    """A server on a data directory, reached through a unix socket that only its owner can open.

    The data stay when it stops. A directory has one owner at a time. The server shuts down cleanly when its
    owner stops it, exits or is killed.
    """

    #: What people call it.
    kind: ClassVar[str]
    #: The file of its socket.
    socket_name: ClassVar[str]
    #: Signals that end it, and how many seconds each may take; the first one also at its owner's death.
    ends: ClassVar[tuple[tuple[signal.Signals, float], ...]]
    #: Recovery after a crash may replay much.
    start_s: ClassVar[float] = 60.0

    def __init__(self, directory: Path, *, log: Path | None = None) -> None:
        """Name the directory; nothing is started yet.

        Args:
            directory: holds everything; made where it is missing.
            log: the server's log, ``directory/<kind>.log`` by default.
        """
        self._directory = directory.expanduser().absolute()
        self._data = self._directory / "data"
        self._log = log or self._directory / f"{self.kind.lower()}.log"
        self._lock: Lock | None = None
        self._child: Child | None = None
        self._sockets: Path | None = None

    @property
    def url(self) -> str:
        """Its address.

        Raises:
            LocalFleetError: it was not started.
        """
        if self._sockets is None:
            raise LocalFleetError(
                f"this {self.kind} was not started, or was stopped: use its address inside its `with` block"
            )
        return self._address(self._sockets)

    @property
    def pid(self) -> int | None:
        """The server's process, None before the start and after the stop."""
        return self._child.pid if self._child else None

    def alive(self) -> bool:
        """Whether the server runs."""
        return self._child is not None and self._child.alive()

    def start(self) -> Self:
        """Start it and wait until it answers.

        Raises:
            LocalFleetError: no server program, a directory in use, or a server that does not come up; the
                message says which and what to do.
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
            wait_until_ready(self._child, self.kind, self._ready, self.start_s)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Shut it down cleanly and let go of the directory; stopping twice is no error."""
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

    @abstractmethod
    def _address(self, sockets: Path) -> str:
        """The URL, given the socket's directory."""

    @abstractmethod
    def _program(self) -> Path:
        """Where the server's program, or programs, are; :class:`LocalFleetError` where they are not."""

    @abstractmethod
    def _prepare(self, program: Path) -> None:
        """Make the data directory fit to be served; its lock is held."""

    @abstractmethod
    def _command(self, program: Path, sockets: Path) -> list[str]:
        """What to run, in the foreground."""

    @abstractmethod
    def _ready(self) -> bool:
        """Whether it answers."""


def clean_environment() -> dict[str, str]:
    """Nothing of the owner's: neither its secrets nor settings meant for other servers."""
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8", "TZ": "UTC"}
