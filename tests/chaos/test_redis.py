"""Redis killed, emptied, silent and full: it only carries messages, so its loss loses no evaluation."""

from __future__ import annotations

import os
import signal
import time
from typing import Any
from uuid import UUID

import pytest
import redis

from kqueue import Client, broker
from kqueue.config import load
from kqueue.store import evaluations
from tests.chaos.rig import PATIENCE_S, Halted


@pytest.fixture
def client(services: Any) -> Any:
    """Return a producer that can submit whatever the state of Redis."""
    with Client(services.config()) as client:
        yield client


def _submit(client: Client, kernel: str = "ok") -> UUID:
    return client.submit(problem="p", kernel=kernel, backend="torch", lane="cpu", allow_idle_lane=True).evaluation_id


def test_redis_may_be_killed(services: Any, fleet: Any, whole: Any, client: Client) -> None:
    """Running evaluations reach their verdicts without Redis, and new ones are judged once after its return."""
    running, waiting = services.submit("sleep 2", attempts=3), services.submit("ok", attempts=3)
    services.started(running)
    os.kill(services.valkey.pid, signal.SIGKILL)
    services.until(lambda: not services.valkey.alive(), what="its end")
    meanwhile = _submit(client)
    assert services.verdict(running, PATIENCE_S).passed
    services.valkey.start()
    services.age()
    whole(running, waiting, meanwhile, attempts=1)


@pytest.mark.parametrize(
    "seconds", [3, pytest.param(60, marks=[pytest.mark.nightly, pytest.mark.timeout(300)])], ids=["seconds", "a minute"]
)
def test_redis_may_be_silent(services: Any, fleet: Any, whole: Any, client: Client, seconds: float) -> None:
    """While Redis accepts connections without answering, verdicts come, submissions are accepted, and workers live."""
    worker = fleet.live()[0].id
    running = services.submit("sleep 2", attempts=3)
    services.started(running)
    silences: list[float] = []
    with Halted(services.valkey.pid):
        ends = time.monotonic() + seconds
        meanwhile = _submit(client)
        assert services.verdict(running, PATIENCE_S).passed
        while time.monotonic() < ends:
            rows = services.rows(
                "SELECT extract(epoch FROM now() - heartbeat_at) FROM workers WHERE id = :id", id=worker
            )
            silences.append(float(rows[0][0]))
            time.sleep(0.2)
    # Half of the default lease.
    assert max(silences, default=0.0) < load().lease_s / 2
    whole(running, meanwhile, attempts=1)
    assert [live.id for live in fleet.live()] == [worker]


def test_redis_may_be_full(services: Any, fleet: Any, whole: Any, client: Client) -> None:
    """While Redis is out of memory, submissions are accepted. They are judged once there is room."""
    running = services.submit("sleep 1", attempts=3)
    services.started(running)
    with services.redis() as connection:
        connection.config_set("maxmemory", "1")
        with pytest.raises(redis.OutOfMemoryError):
            connection.set("one", "more")
        waiting = [_submit(client) for _ in range(2)]
        assert services.verdict(running, PATIENCE_S).passed
        connection.config_set("maxmemory", "0")
    services.age()
    whole(running, *waiting, attempts=1)


@pytest.mark.parametrize(
    "number", [12, pytest.param(300, marks=[pytest.mark.nightly, pytest.mark.timeout(300)])], ids=["some", "hundreds"]
)
def test_redis_may_be_emptied_by_hand(services: Any, fleet: Any, whole: Any, number: int) -> None:
    """An emptied Redis is filled again, each evaluation is judged once, and a running one can be cancelled."""
    first = services.submit("sleep 100", attempts=3)
    services.started(first)
    queued = [services.submit("ok", attempts=3) for _ in range(number)]
    with services.redis() as connection:
        connection.flushall()
        services.until(lambda: connection.llen("kqueue.cpu") == evaluations.window(1), what="the next ones' messages")
    assert evaluations.cancel(services.engine, first)
    broker.revoke(services.app, first)
    whole(*queued, attempts=1)
    assert services.verdict(first).category == "cancelled"
