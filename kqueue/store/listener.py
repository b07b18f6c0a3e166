"""Wait for verdicts, with one connection and one thread for any number of waits."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Collection
from concurrent.futures import Future
from contextlib import closing
from typing import Final
from uuid import UUID

import psycopg
from psycopg.sql import SQL, Identifier
from sqlalchemy import Engine

from kqueue.contract import Verdict
from kqueue.errors import KqueueError
from kqueue.store import evaluations
from kqueue.store.engine import FLEET, acting, connect_listener

_log = logging.getLogger(__name__)

#: Seconds after which all awaited verdicts are read, because their notifications can be missing
#: (:func:`kqueue.store.engine.notify`).
_LOOK_S: Final = 2.0
#: First and maximum pause in seconds before a reconnection. The pause doubles each time.
_RETRY_S: Final = (0.1, 5.0)


class Listener:
    """Waits for verdicts in a thread, which starts with the first :meth:`watch`.

    It reads the database after each connection or reconnection and every two seconds, so a missing notification or a
    broken connection delays an answer but never loses it. ``url`` and ``engine`` are of one database. ``application``
    is the name in ``pg_stat_activity``.
    """

    def __init__(self, url: str, engine: Engine, *, application: str) -> None:
        self._url = url
        self._engine = engine
        self._application = application
        self._lock = threading.Lock()
        self._waiters: dict[UUID, list[Future[Verdict]]] = {}
        self._unread: set[UUID] = set()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._bell, self._push = socket.socketpair()
        self._bell.setblocking(False)
        self._push.setblocking(False)

    def watch(self, evaluation_id: UUID) -> Future[Verdict]:
        """Return a future of the evaluation's verdict. Cancel it to stop waiting.

        For an evaluation that does not exist, the future is never set.
        """
        future: Future[Verdict] = Future()
        with self._lock:
            if self._closing.is_set():
                raise KqueueError("the client is closed")
            self._waiters.setdefault(evaluation_id, []).append(future)
            self._unread.add(evaluation_id)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="kqueue-verdicts", daemon=True)
                self._thread.start()
        future.add_done_callback(lambda done: self._forget(evaluation_id, done))
        self._ring()
        return future

    def close(self) -> None:
        """Stop the thread. Pending futures raise a :class:`~kqueue.errors.KqueueError`."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            thread = self._thread
        self._ring()
        if thread is not None:
            thread.join()
        self._bell.close()
        self._push.close()

    def _forget(self, evaluation_id: UUID, future: Future[Verdict]) -> None:
        with self._lock:
            waiting = self._waiters.get(evaluation_id, [])
            if future in waiting:
                waiting.remove(future)
            if not waiting:
                self._waiters.pop(evaluation_id, None)

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a wake-up is already pending
            self._push.send(b"!")

    def _run(self) -> None:
        pause = _RETRY_S[0]
        try:
            while not self._closing.is_set():
                try:
                    with closing(connect_listener(self._url, application=self._application)) as connection:
                        connection.execute(SQL("LISTEN {}").format(Identifier(evaluations.VERDICTS_CHANNEL)))
                        self._settle(self._awaited())
                        pause = _RETRY_S[0]
                        self._listen(connection)
                except (KqueueError, psycopg.Error) as error:
                    _log.warning("the wait for verdicts resumes in %.1f s: %s", pause, error)
                    self._closing.wait(pause)
                    pause = min(2 * pause, _RETRY_S[1])
        finally:
            reason = "the client was closed" if self._closing.is_set() else "waiting for verdicts failed, see the log"
            for future in self._awaited_futures():
                if future.set_running_or_notify_cancel():
                    future.set_exception(KqueueError(reason))

    def _listen(self, connection: psycopg.Connection) -> None:
        """Settle the notified evaluations, until the listener is closed or the connection breaks."""
        with selectors.DefaultSelector() as selector:
            selector.register(connection.fileno(), selectors.EVENT_READ)
            selector.register(self._bell, selectors.EVENT_READ)
            look_at = time.monotonic() + _LOOK_S
            while not self._closing.is_set():
                selector.select(max(0.0, look_at - time.monotonic()) if self._waiters else None)
                if time.monotonic() >= look_at:
                    look_at = time.monotonic() + _LOOK_S
                    self._settle(self._awaited())
                with contextlib.suppress(BlockingIOError):  # there was no wake-up
                    self._bell.recv(4096)
                connection.pgconn.consume_input()
                notified: set[UUID] = set()
                while notification := connection.pgconn.notifies():
                    with contextlib.suppress(ValueError):  # not a notification of kqueue
                        notified.add(UUID(notification.extra.decode("ascii", "replace")))
                with self._lock:
                    news = (self._unread | notified) & self._waiters.keys()
                    self._unread.clear()
                self._settle(news)

    def _settle(self, ids: Collection[UUID]) -> None:
        """Set the futures of all evaluations in ``ids`` that have a verdict."""
        if not ids:
            return
        # Callers have checked that they see the evaluations.
        with acting(FLEET):
            verdicts = evaluations.verdicts(self._engine, ids)
        for evaluation_id, verdict in verdicts.items():
            with self._lock:
                waiting = self._waiters.pop(evaluation_id, [])
            for future in waiting:
                if future.set_running_or_notify_cancel():
                    future.set_result(verdict)

    def _awaited(self) -> set[UUID]:
        with self._lock:
            self._unread.clear()
            return set(self._waiters)

    def _awaited_futures(self) -> list[Future[Verdict]]:
        with self._lock:
            futures = [future for waiting in self._waiters.values() for future in waiting]
            self._waiters.clear()
            return futures
