"""Logins of producers that fill Postgres's queue of notifications, or hold locks, under a real fleet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from kqueue import Client
from kqueue.local.servers import Postgres, Valkey
from kqueue.store import roles
from tests.fleet.told import Fleet, Services
from tests.services import connected, starts_services, with_schema
from tests.waiting import repeated, until

USAGE = "SELECT pg_notification_queue_usage()"
SESSION = "SELECT FROM pg_stat_activity WHERE pid = :pid"


class Narrow(Postgres):
    """A Postgres whose queue of notifications holds half a megabyte."""

    def _command(self, program: Path, sockets: Path) -> list[str]:
        return [*super()._command(program, sockets), "-c", "max_notify_queue_pages=64"]


@pytest.fixture(scope="module")
@starts_services
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """Start services with a narrow queue of notifications, and make a producer's login."""
    directory = tmp_path_factory.mktemp("narrow")
    directory.chmod(0o755)
    with Narrow(with_schema(directory / "pg"), durable=False) as postgres, Valkey(directory / "valkey") as valkey:
        services = Services(postgres, valkey, directory)
        roles.login(services.engine, "bob", roles.PRODUCER, "x", owner="bob")
        yield services
        services.engine.dispose()
        services.app.close()


@pytest.fixture
def connect(services: Services) -> Iterator[Callable[[], psycopg.Connection[Any]]]:
    """Return a function that opens a connection of the producer's login."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(closing(connected(services.postgres.url, username="bob")))


@pytest.mark.parametrize("kind", [pytest.param("in a transaction", marks=pytest.mark.nightly), "deaf"])
def test_a_full_queue_stops_no_verdict(
    services: Services, fleet: Fleet, connect: Callable[[], psycopg.Connection[Any]], kind: str
) -> None:
    """Verdicts are recorded and reach their waiters while the queue is full, and the fleet empties it."""
    before = [worker.pid for worker in until(fleet.live, what="the worker")]
    listening = connect()
    listening.execute("LISTEN flood")
    if kind == "in a transaction":
        listening.execute("BEGIN")
        listening.execute("SELECT 1")
    flooding = connect()

    def flood() -> None:
        with suppress(psycopg.OperationalError):  # also if the queue is full
            flooding.execute("SELECT pg_notify('flood', repeat('x', 7900) || g) FROM generate_series(1, 3) AS g")

    with repeated(flood, 0):
        until(lambda: services.rows(USAGE)[0][0] > 0.9, what="a full queue")
        with Client(services.config()) as client:
            begun = time.monotonic()
            fields = {"problem": "p", "backend": "torch", "lane": "cpu"}
            tickets = client.submit_batch([fields | {"kernel": "ok", "kernel_label": f"{kind} {n}"} for n in range(6)])
            verdicts = client.wait_all(tickets, timeout=60)
            took_s = time.monotonic() - begun
        assert [(verdict.category, verdict.attempts) for verdict in verdicts] == [("passed", 1)] * 6
        assert took_s < 30
        until(lambda: not services.rows(SESSION, pid=listening.info.backend_pid), what="the end of the listener")
    until(lambda: services.rows(USAGE)[0][0] < 0.1, what="an empty queue")
    assert [worker.pid for worker in fleet.live()] == before
    assert "held all notifications, and was ended" in fleet.log.read_text()
