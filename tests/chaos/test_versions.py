"""Two real hosts that are upgraded to a newer version one after the other."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from kqueue import Client
from kqueue.store import schema
from tests.chaos.network import Network
from tests.chaos.rig import PATIENCE_S
from tests.chaos.version import OtherVersion
from tests.judge.extension import PROBLEM, QUICK
from tests.store.steps import change

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

#: A kernel that is judged quickly, with a number that makes each one distinct.
_DOUBLES = """
import torch
class ModelNew(torch.nn.Module):
    def forward(self, x):
        return x + x  # {number}
"""
#: Seconds from one submission to the next, chosen so that a busy machine's two slots do not quite keep up.
_EVERY_S = 2.0


@pytest.fixture(scope="module")
def start_host(network: Network, start_fleet: Any) -> Any:
    """Return a function that starts a fleet on a host, with one slot and real judges."""

    def start(host: int, **more: Any) -> Any:
        addresses = {"database_url": network.postgres_url, "redis_url": network.redis_url}
        return start_fleet(true=True, prefix=network.on(host), **addresses, **more)

    return start


def test_a_fleet_that_the_schema_has_left_behind_may_be_stopped(services: Any, start_fleet: Any, whole: Any) -> None:
    """Workers that fit the schema repeat the attempts that the outdated fleet cannot record."""
    fleet = start_fleet()
    running, waiting = services.submit("sleep 2", attempts=3), services.submit("ok", attempts=3)
    services.started(running)
    change(services.engine, "ALTER TABLE attempts RENAME COLUMN outcome TO result")
    change(services.engine, "ALTER TABLE workers RENAME COLUMN heartbeat_at TO beaten_at")
    try:
        assert fleet.stop(signal.SIGTERM, PATIENCE_S) == 0
    finally:
        change(services.engine, "ALTER TABLE workers RENAME COLUMN beaten_at TO heartbeat_at")
        change(services.engine, "ALTER TABLE attempts RENAME COLUMN result TO outcome")
    fleet = start_fleet()
    again = whole(running)
    assert [(attempt.category, attempt.handed_back) for attempt in again] == [("worker_lost", False), ("passed", False)]
    whole(waiting, attempts=1)
    assert fleet.stop(signal.SIGTERM) == 0


@pytest.fixture
def newer() -> Iterator[OtherVersion]:
    """Create a version after this one."""
    folder = Path(tempfile.mkdtemp(prefix="kqueue-newer-"))
    folder.chmod(0o755)
    try:
        yield OtherVersion(folder)
    finally:
        shutil.rmtree(folder)


class _Producer(threading.Thread):
    """Submits one evaluation after another with this version's client, until it is stopped."""

    def __init__(self, services: Any) -> None:
        super().__init__(name="producer", daemon=True)
        self._client = Client(services.config())
        self._told = threading.Event()
        self.accepted: list[UUID] = []
        self.refused: list[str] = []

    def run(self) -> None:
        # The rhythm is uneven: at an even one, a process that polls Redis in step might never be the first to read.
        while not self._told.wait(_EVERY_S * random.uniform(0.5, 1.5)):
            source = _DOUBLES.format(number=len(self.accepted))
            try:
                ticket = self._client.submit(
                    problem=PROBLEM, kernel=source, backend="torch", lane="cpu", settings=QUICK, allow_idle_lane=True
                )
                self.accepted.append(ticket.evaluation_id)
            except Exception as error:  # noqa: BLE001
                self.refused.append(repr(error))

    def stop(self) -> None:
        self._told.set()
        self.join()
        self._client.close()


# This test is the last of the module because it leaves its services with a newer schema.
def test_hosts_are_upgraded_while_evaluations_come(
    services: Any, network: Network, start_host: Any, newer: OtherVersion
) -> None:
    """Nothing is lost, refused or repeated if the schema is upgraded first, then each host."""
    assert newer.kqueue("--version", environment={}).strip() == f"kqueue {OtherVersion.NAME}"
    url = services.postgres.url
    fleets = [start_host(host) for host in range(2)]
    producer = _Producer(services)
    producer.start()
    try:
        version = _judged(services, "host-0")
        assert version == _judged(services, "host-1") != OtherVersion.NAME

        newer.kqueue("db", "upgrade", environment={"KQUEUE_DATABASE_URL": url})
        assert schema.current(url) == OtherVersion.REVISION
        lives = _lives(services)
        for host in ("host-0", "host-1"):
            assert _judged(services, host) == version
        assert _lives(services) == lives, "a worker ended of the newer schema"

        for host, fleet in enumerate(fleets):
            other = f"host-{1 - host}"
            assert fleet.stop(signal.SIGTERM) == 0
            if host == 0:
                _is_refused(network.on(host), fleet)
            away = _now(services)
            fleets[host] = start_host(host, variables=newer.variables)
            assert _versions(services, other, away), f"{other} did not serve meanwhile"
            assert _judged(services, f"host-{host}") == OtherVersion.NAME
    finally:
        producer.stop()
        ended = [services.verdict(identity, PATIENCE_S) for identity in producer.accepted]
        for fleet in fleets:
            fleet.stop(signal.SIGTERM)
    assert producer.refused == []
    assert {(verdict.category, verdict.attempts) for verdict in ended} == {("passed", 1)}
    [(verdicts, evaluations)] = services.rows(
        "SELECT count(*), count(DISTINCT evaluation_id) FROM verdicts WHERE evaluation_id = ANY(:ids)",
        ids=producer.accepted,
    )
    assert verdicts == evaluations == len(producer.accepted)
    judged_by = {(verdict.environment.host, verdict.environment.kqueue) for verdict in ended}
    assert judged_by == {(f"host-{host}", told) for host in range(2) for told in (version, OtherVersion.NAME)}


def _versions(services: Any, host: str, since: Any) -> list[str | None]:
    """Return the versions that judged the evaluations that a host began after a time of the database."""
    found = services.rows(
        "SELECT n.facts ->> 'kqueue' AS version "
        "FROM attempts AS a JOIN environments AS n ON n.hash = a.environment_hash "
        "WHERE n.host = :host AND a.category = 'passed' AND a.started_at > :since",
        host=host,
        since=since,
    )
    return [row.version for row in found]


def _now(services: Any) -> Any:
    [(now,)] = services.rows("SELECT now()")
    return now


def _judged(services: Any, host: str) -> str | None:
    """Wait until a host has judged one more evaluation that it begins now, and return its version."""
    now = _now(services)
    [version, *_] = services.until(lambda: _versions(services, host, now), 2 * PATIENCE_S, f"a verdict of {host}")
    return version


def _lives(services: Any) -> set[UUID]:
    """Return the registered worker processes."""
    return {row.id for row in services.rows("SELECT id FROM workers WHERE stopped_at IS NULL")}


def _is_refused(prefix: list[str], fleet: Any) -> None:
    """Check that an older supervisor refuses the newer schema and prints the remedy."""
    command = [*prefix, sys.executable, "-P", "-m", "workers.fleet"]
    done = subprocess.run(command, env=fleet.environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 3
    assert "made by a newer version, so upgrade kqueue here" in done.stderr
