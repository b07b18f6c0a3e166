"""Workers start and end, services stop and return, and every evaluation ends once and in its turn."""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from kqueue import Client
from kqueue.store import evaluations
from tests.chaos.rig import Whole
from tests.store.steps import change
from workers.judge.host import linux


def _worker_pid(fleet: Any) -> int:
    return fleet.live()[0].pid


def _state(services: Any, evaluation: UUID) -> str:
    return services.rows("SELECT state FROM evaluations WHERE id = :id", id=evaluation)[0].state


def test_the_next_judge_is_there_at_once(services: Any, fleet: Any) -> None:
    """Guards the private parts of Celery that the pool extends: stock Celery needs 5 s for most tasks."""
    ids = [services.submit("ok") for _ in range(13)]
    for identity in ids:
        services.verdict(identity)
    rows = services.rows(
        "SELECT started_at, ended_at FROM attempts WHERE evaluation_id = ANY(:ids) ORDER BY started_at", ids=ids
    )
    gaps = [(b.started_at - a.ended_at).total_seconds() for a, b in itertools.pairwise(rows)]
    assert len(gaps) == 12
    # Stock Celery notices a child's end at its next check, every 5 s.
    assert statistics.median(gaps) < 4, gaps


def test_one_does_not_wait_for_anothers_many(services: Any, fleet: Any, tmp_path: Path) -> None:
    """A producer's single evaluation begins after the running one, before another producer's earlier batch."""

    def submit(kernel: str, producer: str) -> UUID:
        fields = {"problem": "p", "kernel": kernel, "backend": "torch", "lane": "cpu", "producer": producer}
        return client.submit(**fields).evaluation_id

    def head() -> UUID | None:
        with services.redis() as queue:
            last = queue.lrange("kqueue.cpu", -1, -1)  # workers take from the tail
        return UUID(json.loads(last[0])["headers"]["id"]) if last else None

    services.until(lambda: all(worker.busy_with is None for worker in fleet.live()), what="an idle worker")
    change(services.engine, "DELETE FROM shares")
    with Client(services.config()) as client:
        running = submit(f"gate {tmp_path / 'gate'}", "many")
        services.started(running)
        many = [submit(f"ok {number}", "many") for number in range(20)]  # more than a window of messages
        one = submit("ok one", "one")
        services.until(lambda: head() == one, what="the order in Redis")
        (tmp_path / "gate").touch()
        assert all(services.verdict(identity).passed for identity in (running, *many, one))
    begun = services.rows(
        "SELECT evaluation_id FROM attempts WHERE evaluation_id = ANY(:ids) ORDER BY started_at", ids=[*many, one]
    )
    assert [row.evaluation_id for row in begun] == [one, *many]


def test_a_worker_without_its_fork_server_is_replaced(services: Any, fleet: Any) -> None:
    """Without its fork server a worker cannot judge, so it takes no more work and ends."""
    before = fleet.live()[0]
    [stand_in] = [pid for pid in linux.children(before.pid) if "sleep" in Path(f"/proc/{pid}/comm").read_text()]
    os.kill(stand_in, signal.SIGKILL)
    services.until(lambda: any(w.id != before.id for w in fleet.live()), what="the replacement")
    assert services.verdict(services.submit("ok")).passed


def test_a_quick_stop_hands_the_evaluation_back(services: Any, fleet: Any, running_fleet: Callable[[], Any]) -> None:
    """After SIGINT running evaluations are killed and queued again at once."""
    pids = [_worker_pid(fleet), *linux.children(_worker_pid(fleet))]
    running = services.submit("sleep-once", attempts=2)
    services.started(running)
    assert fleet.stop(signal.SIGINT) == 0
    assert _state(services, running) == "queued"
    services.until(lambda: not any(services.alive(pid) for pid in pids))
    running_fleet()
    Whole(services)(running)


def test_nothing_outlives_a_killed_supervisor(services: Any, fleet: Any, running_fleet: Callable[[], Any]) -> None:
    """After SIGKILL of the supervisor its workers and judges die, and an expired lease is handed back."""
    running = services.submit("sleep-once", attempts=2)
    services.started(running)
    pids = [_worker_pid(fleet)]
    judges = [p for p in linux.children(pids[0]) if "sleep" not in Path(f"/proc/{p}/comm").read_text()]
    fleet.stop(signal.SIGKILL)
    services.until(lambda: not any(services.alive(pid) for pid in pids + judges))
    running_fleet()
    attempts = Whole(services)(running, attempts=2)
    assert [a.written_by for a in attempts] == ["sweeper", "judge"]


def test_a_warm_stop_lets_the_judge_finish(services: Any, fleet: Any) -> None:
    """After SIGTERM running evaluations end normally, queued ones stay queued, rows are closed, and processes end."""
    pids = [fleet.process.pid, _worker_pid(fleet), *linux.children(_worker_pid(fleet))]
    running, waiting = services.submit("sleep 1.5"), services.submit("ok")
    services.started(running)
    assert fleet.stop(signal.SIGTERM) == 0
    assert services.verdict(running).passed
    assert _state(services, waiting) == "queued"
    assert fleet.live() == []
    assert not any(services.alive(pid) for pid in pids)
    evaluations.cancel(services.engine, waiting)


@pytest.mark.nightly
def test_a_warm_stop_ends_though_postgres_is_away(services: Any, fleet: Any) -> None:
    """The stop waits for no unwritten record. A sweeper writes it after the leases have expired."""
    services.verdict(services.submit("ok"))  # the stop would wait for a task that waits for Postgres
    services.postgres.stop()
    try:
        assert fleet.stop(signal.SIGTERM) == 0
    finally:
        services.postgres.start()
        services.engine.dispose()
