"""A client that is made when it is first needed, and once a process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

ClientT = TypeVar("ClientT")


class Connection(Generic[ClientT]):
    """Threads share it, copies are the same one, and another process (a fork, or by pickling) makes its own client."""

    def __init__(self, connect: Callable[[], ClientT]) -> None:
        """Say what makes a client; nothing is made yet."""
        self._connect = connect
        self._lock = threading.Lock()
        self._client: ClientT | None = None
        self._process = 0

    def client(self) -> ClientT:
        """The client."""
        with self._lock:
            if self._client is None or self._process != os.getpid():
                self._client, self._process = self._connect(), os.getpid()
            return self._client

    def take(self) -> ClientT | None:
        """The client to close, if this process has made one; the next :meth:`client` makes another."""
        with self._lock:
            client, self._client = self._client, None
            return client if self._process == os.getpid() else None

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._connect,)
