"""PgBouncer in front of Postgres: a fleet works in session mode and not in transaction mode."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from psycopg.sql import SQL
from sqlalchemy import text
from sqlalchemy.exc import ProgrammingError

from kqueue import Client, broker, sweeper
from kqueue.store import evaluations
from kqueue.store.engine import connect, connect_listener
from kqueue.store.evaluations import VERDICTS_CHANNEL
from tests.chaos.pooler import Pooler
from tests.chaos.rig import PATIENCE_S
from tests.store.steps import change

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

_DOCUMENT = Path(__file__).parents[2] / "docs" / "operations.md"
#: The document's statements for an operator whose pooler drops the limits that kqueue sends.
_LIMITS = re.findall(r"^ALTER DATABASE kqueue SET \w+ = .*;$", _DOCUMENT.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def start_pooler(services: Any) -> Callable[..., Pooler]:
    """Return a function that puts a pooler in front of this module's Postgres, whose database has the limits."""
    with services.engine.begin() as connection:
        for statement in _LIMITS:
            connection.execute(text(statement))

    def start(place: Path, **more: Any) -> Pooler:
        try:
            return Pooler(services.postgres, place, **more)
        except FileNotFoundError as error:
            pytest.skip(str(error))

    return start


def _hears(pooler: Pooler, services: Any, timeout_s: float) -> bool:
    """Return whether a listener through the pooler receives a later notification."""
    with closing(connect_listener(pooler.url, application="tests")) as connection:
        connection.execute(SQL("LISTEN kqueue_verdicts"))
        change(services.engine, "SELECT pg_notify(:channel, 'news')", channel=VERDICTS_CHANNEL)
        return any(told.payload == "news" for told in connection.notifies(timeout=timeout_s, stop_after=1))


def test_a_fleet_may_reach_postgres_through_sessions(
    services: Any, start_fleet: Any, start_pooler: Callable[..., Pooler], whole: Any, tmp_path: Path
) -> None:
    """In session mode evaluations end once, listeners are notified, one process sweeps, and limits hold."""
    with start_pooler(tmp_path / "pooler", size=40) as pooler:
        fleet = start_fleet(slots=2, database_url=pooler.url)
        with Client(services.config(database_url=pooler.url)) as client:
            fields = {"problem": "p", "backend": "torch", "lane": "cpu"}
            tickets = client.submit_batch([fields | {"kernel": f"sleep 0.{number}"} for number in range(9)])
            assert {verdict.attempts for verdict in client.wait_all(tickets, timeout=PATIENCE_S)} == {1}
        whole(services.submit("signal SIGKILL", attempts=1), category="worker_lost")
        assert _hears(pooler, services, PATIENCE_S)
        one, other = (connect(pooler.url, application="tests", pool_size=2) for _ in range(2))
        app = broker.make_app(services.config())
        fleet.stop()
        for engine in (one, other, one):
            assert sweeper.sweep(engine, app, retry_delay_s=0.1).swept
        with one.connect() as connection:
            limits = {name: connection.scalar(text(f"SHOW {name}")) for name in ("statement_timeout", "timezone")}
            assert limits == {"statement_timeout": "30s", "timezone": "UTC"}
        app.close()
        one.dispose()
        other.dispose()


def test_transactions_of_a_pool_are_not_enough(
    services: Any, start_pooler: Callable[..., Pooler], tmp_path: Path
) -> None:
    """In transaction mode notifications and prepared statements are lost with the connection."""
    with start_pooler(tmp_path / "pooler", mode="transaction") as pooler:
        assert not _hears(pooler, services, 3.0)
        one, other = (connect(pooler.url, application="tests", pool_size=1) for _ in range(2))
        for _ in range(8):  # until the driver has prepared it
            evaluations.upcoming(one, {})
        with other.begin() as connection:
            connection.execute(text("SELECT 1"))  # holds the connection on which it was prepared
            with pytest.raises(ProgrammingError, match="prepared statement"):
                evaluations.upcoming(one, {})
        one.dispose()
        other.dispose()
