"""A supervisor's work in Postgres and Redis: its workers' rows and leases, and the sweeper."""

from __future__ import annotations

import math
import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Final
from uuid import UUID

import psycopg
import structlog
from psycopg.sql import SQL, Identifier

from kqueue import broker, sweeper
from kqueue.config import Config
from kqueue.errors import BrokerUnavailable, DatabaseUnavailable, SchemaMismatch
from kqueue.registry import attached
from kqueue.store import engine as store_engine
from kqueue.store import evaluations, schema
from kqueue.store import workers as registry
from workers.slot import Slot

_log: Any = structlog.get_logger(__name__)

_SWEEP_EVERY_S: Final = 1.0
#: Seconds between sweeps while every evaluation has its verdict.
_SWEEP_IDLE_S: Final = 3.0
#: Seconds before the next sweep after an outage of a service.
_SWEEP_AGAIN_S: Final = 3.0
#: Least seconds between two fillings of Redis. Meanwhile workers take the messages that are already there.
_FILL_EVERY_S: Final = 0.05
#: Seconds for which a supervisor does not fill Redis after it found another one doing so. One supervisor that reacts
#: to every submission and every verdict is enough.
_YIELD_S: Final = 1.0
#: Seconds before the connection for notifications is opened again.
_LISTEN_AGAIN_S: Final = 3.0
#: Seconds to wait for the services at the start.
_SERVICES_S: Final = 10.0


@dataclass(slots=True)
class _Loss:
    """A dead worker whose row is still open."""

    worker_id: UUID
    message: str
    handed_back: bool
    since: float = field(default_factory=time.monotonic)


class _Notifications:
    """Postgres notifications of submissions and verdicts, on a separate connection in the supervisor's selector.

    The next sweep makes up for notifications that were missed without a connection.
    """

    def __init__(self, url: str, selector: selectors.BaseSelector) -> None:
        self._url = url
        self._selector = selector
        self._connection: psycopg.Connection | None = None
        self._fileno = -1
        self._again_at = 0.0
        #: True if a notification has come since the last fill.
        self.fresh = False

    def listen(self) -> None:
        """Open the connection if there is none and the pause after the last try is over."""
        now = time.monotonic()
        if self._connection is not None or now < self._again_at:
            return
        self._again_at = now + _LISTEN_AGAIN_S
        with suppress(DatabaseUnavailable, psycopg.Error):
            connection = store_engine.connect_listener(self._url, application="kqueue supervisor news")
            for channel in (evaluations.SUBMISSIONS_CHANNEL, evaluations.VERDICTS_CHANNEL):
                connection.execute(SQL("LISTEN {}").format(Identifier(channel)))
            self._fileno = connection.fileno()
            self._selector.register(self._fileno, selectors.EVENT_READ, self)
            self._connection = connection
            self.fresh = True

    def hear(self) -> None:
        """Read the notifications that have arrived."""
        if self._connection is None:
            return
        try:
            self._connection.pgconn.consume_input()
            while self._connection.pgconn.notifies():
                self.fresh = True
        except psycopg.Error:
            self.close()

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            # The stored number, because a broken connection has none. The selector can be closed already.
            with suppress(KeyError, ValueError):
                self._selector.unregister(self._fileno)
            self._connection.close()
            self._connection = None


class Bookkeeping:
    """The database rows of one host's workers.

    If Postgres is away, nothing is lost: methods return False, or keep their work for the next call.
    """

    def __init__(self, config: Config, host: str, selector: selectors.BaseSelector) -> None:
        """Configure the connections without opening them."""
        self._config = config
        self._host = host
        self.engine = store_engine.connect(config.require_database(), application="kqueue supervisor", pool_size=2)
        self._app = broker.make_app(config)
        # A Redis that hangs must not delay heartbeats.
        self._app.conf.broker_transport_options |= {"socket_timeout": 3, "socket_connect_timeout": 2}
        self._away = False
        self._losses: list[_Loss] = []
        self._held: str | None = None
        self._heartbeat_at = 0.0
        self._sweep_at = 0.0
        self._news = _Notifications(config.require_database(), selector)
        #: Monotonic time before which this supervisor does not fill Redis between sweeps.
        self._fill_after = 0.0

    def check_services(self) -> None:
        """Check Postgres, its schema and Redis. Retry for some seconds, because the schema can be migrating.

        Raises:
            DatabaseUnavailable, BrokerUnavailable: one of them does not answer.
            SchemaMismatch: the database's schema does not match this version of kqueue.
        """
        deadline = time.monotonic() + _SERVICES_S
        while True:
            try:
                schema.check(self.engine)
                broker.check(self._app)
                return
            except (DatabaseUnavailable, BrokerUnavailable, SchemaMismatch):
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.1)

    @property
    def due_at(self) -> float:
        """Monotonic time at which :meth:`step` next has something to do."""
        fill_at = self._fill_after if self._news.fresh and not self._away else math.inf
        return min(self._heartbeat_at, self._sweep_at, fill_at)

    @property
    def settled(self) -> bool:
        """True if the rows of all dead workers are closed."""
        return not self._losses

    def attempt(self, work: Callable[[], object]) -> bool:
        """Run a function that uses Postgres. Return False if Postgres is away, which is logged once per outage."""
        try:
            work()
        except (DatabaseUnavailable, SchemaMismatch) as error:
            # Another version's schema counts as an outage: the database is being upgraded or downgraded.
            if not self._away:
                _log.error("Postgres is away: work that needs it waits", reason=str(error))
            self._away = True
            return False
        if self._away:
            _log.info("Postgres is back")
        self._away = False
        return True

    def register(self, slot: Slot, pid: int, paused: str | None) -> bool:
        """Write a worker's row, with the reason of its pause if any. Return False if Postgres is away."""
        return self.attempt(
            lambda: registry.register(
                self.engine,
                id=slot.worker_id,
                name=f"{slot.name}@{self._host}",
                host=self._host,
                pid=pid,
                lanes=slot.lanes,
                device=slot.device,
                paused=paused,
            )
        )

    def pause(self, reasons: Mapping[UUID, str | None]) -> bool:
        """Write the reason of each worker's pause, or None. Return False if Postgres is away."""
        return self.attempt(lambda: registry.pause(self.engine, reasons))

    def wait_for_device(self, holders: Mapping[UUID, str | None]) -> bool:
        """Write the holder of the device that each worker waits for, or None. Return False if Postgres is away."""
        return self.attempt(lambda: registry.wait_for_device(self.engine, holders))

    def note_steps(self, steps: Mapping[tuple[UUID, int], str | None]) -> bool:
        """Write the current steps of attempts (:func:`registry.note_steps`). Return False if Postgres is away."""
        return self.attempt(lambda: registry.note_steps(self.engine, steps))

    def idle(self) -> set[UUID]:
        """Return the workers of this host that judge nothing now. Empty if Postgres is away."""
        idle: set[UUID] = set()

        def look() -> None:
            live = registry.live(self.engine, within_s=self._config.lease_s)
            idle.update(worker.id for worker in live if worker.host == self._host and worker.busy_with is None)

        self.attempt(look)
        return idle

    def held(self) -> str | None:
        """Return the reason why a feature pauses this host's CPU slots, or None.

        If Postgres is away, return the last answer.
        """

        def look() -> None:
            self._held = next(filter(None, (one.held(self.engine, self._host) for one in attached("duty"))), None)

        self.attempt(look)
        return self._held

    def lose(self, worker_id: UUID, message: str, *, handed_back: bool = False) -> None:
        """Close a dead worker's row at the next :meth:`settle`.

        Args:
            worker_id: the row.
            message: the worker's end in words.
            handed_back: whether the supervisor killed it, so that its evaluation does not use up an attempt.
        """
        self._losses.append(_Loss(worker_id, message, handed_back))

    def settle(self, *, stopping: bool, at_once: bool) -> None:
        """Close the rows of dead workers, and queue their evaluations again.

        Args:
            stopping: give up after one lease if Postgres is away. A sweeper closes the rows when the leases run out.
            at_once: give up at the first failure.
        """
        while self._losses:
            loss = self._losses[0]

            def close(loss: _Loss = loss) -> None:
                lost = evaluations.lose_worker(
                    self.engine,
                    loss.worker_id,
                    retry_delay_s=self._config.retry_delay_s,
                    message=loss.message,
                    handed_back=loss.handed_back,
                )
                for evaluation_id, recorded in lost:
                    _log.warning(
                        "an attempt ended with its worker",
                        evaluation=str(evaluation_id),
                        recorded=recorded.value,
                        reason=loss.message,
                    )
                registry.stop(self.engine, loss.worker_id)

            if not self.attempt(close):
                late = time.monotonic() - loss.since > self._config.lease_s
                if at_once or (stopping and late):
                    self._losses.clear()
                return
            self._losses.pop(0)
            # Its evaluation is queued again.
            self._sweep_at = time.monotonic()

    def step(self, worker_ids: Sequence[UUID]) -> None:
        """Renew the leases of the given workers, sweep, and fill Redis with the next messages, each if due."""
        now = time.monotonic()
        if now >= self._heartbeat_at:
            self._heartbeat_at = now + min(self._config.lease_s, 60.0) / 4  # sweepers give workers up after 90 s
            self.attempt(lambda: registry.heartbeat(self.engine, worker_ids, lease_s=self._config.lease_s))
        if now >= self._sweep_at:
            self._sweep_at = now + _SWEEP_EVERY_S
            # A supervisor that cannot renew its own leases must not declare other supervisors' leases overdue.
            if not self._away:
                self._sweep()
        if not self._away:
            self._news.listen()
            if self._news.fresh and now >= self._fill_after:
                self._news.fresh = False
                self.attempt(self._fill)

    def close(self) -> None:
        """Close the connections."""
        self._news.close()
        self.engine.dispose()

    def _fill(self) -> None:
        try:
            pause = _FILL_EVERY_S if sweeper.fill_alone(self.engine, self._app) else _YIELD_S
        except BrokerUnavailable:
            # The sweeps log this error.
            pause = _SWEEP_AGAIN_S
        self._fill_after = time.monotonic() + pause

    def _sweep(self) -> None:
        report: sweeper.SweepReport | None = None

        def sweep() -> None:
            nonlocal report
            delay_s = self._config.retry_delay_s
            report = sweeper.sweep(self.engine, self._app, retry_delay_s=delay_s, config=self._config)

        if not self.attempt(sweep) or report is None:
            self._sweep_at = time.monotonic() + _SWEEP_AGAIN_S
            return
        for evaluation_id, recorded in report.lost:
            _log.warning("a lease ran out", evaluation=str(evaluation_id), recorded=recorded.value)
        if report.missing:
            _log.info("messages were missing from Redis", count=report.missing)
        if report.pruned:
            _log.info("old evaluations removed", **asdict(report.pruned))
        if report.broker_error:
            self._sweep_at = time.monotonic() + _SWEEP_AGAIN_S
        elif report.idle:
            self._sweep_at = time.monotonic() + _SWEEP_IDLE_S
