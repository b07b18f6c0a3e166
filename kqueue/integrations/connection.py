"""A client that is created on first use, once per process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

ClientT = TypeVar("ClientT")


class Connection(Generic[ClientT]):
    """A lazy client. Threads and copies share it. Another process (forked, or given a pickle) creates its own."""

    def __init__(self, connect: Callable[[], ClientT]) -> None:
        """Store ``connect``, which the first use calls to create the client."""
        self._connect = connect
        self._lock = threading.Lock()
        self._client: ClientT | None = None
        self._process = 0

    def client(self) -> ClientT:
        """Return this process's client, creating it if necessary."""
        with self._lock:
            if self._client is None or self._process != os.getpid():
                self._client, self._process = self._connect(), os.getpid()
            return self._client

    def take(self) -> ClientT | None:
        """Return this process's client, if any, for the caller to close. :meth:`client` then creates another one."""
        with self._lock:
            client, self._client = self._client, None
            return client if self._process == os.getpid() else None

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._connect,)
