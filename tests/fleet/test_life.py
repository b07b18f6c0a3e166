"""Workers start, fail and end, and every evaluation ends once, in its turn, or by an equal one's verdict."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from kqueue import Client
from kqueue.states import Priority, Writer
from kqueue.store import evaluations
from kqueue.store.engine import Viewer, acting
from tests.chaos.rig import Whole
from tests.fleet.told import HERE, Fleet, Services, renewing
from tests.store.steps import change
from workers.judge.host import linux


@pytest.fixture(scope="module")
def running_fleet(start_fleet: Callable[..., Fleet]) -> Callable[[], Fleet]:
    """Return the module's fleet of one worker, which reuses verdicts. If a test has ended it, start another first."""
    return renewing(partial(start_fleet, reuse=True))


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


@pytest.mark.usefixtures("fleet")
def test_what_waits_is_answered_by_its_equal(services: Services, tmp_path: Path) -> None:
    """Of equal evaluations that wait for one slot, only one is judged."""
    gate = tmp_path / "gate"
    ids = [services.submit(f"known gate {gate}") for _ in range(4)]
    services.until(lambda: any(services.attempts(identity) for identity in ids), what="the first attempt")
    gate.touch()
    verdicts = [services.verdict(identity) for identity in ids]
    [judged] = [verdict for verdict in verdicts if verdict.reused_from is None]
    assert [v.reused_from for v in verdicts if v is not judged] == [judged.evaluation_id] * 3
    assert sum(len(services.attempts(identity)) for identity in ids) == 1
    assert [v.written_by for v in verdicts].count(Writer.DATABASE) == 3


def test_a_handler_that_fails_ends_the_worker(services: Any, fleet: Any) -> None:
    """Celery would go on, but the worker is replaced until one can work."""
    [worker] = fleet.live()
    for where, handler in (("start", "_prepare"), ("child", "_prepare_child"), ("ready", "_report_ready")):
        told = len(fleet.log.read_text())
        fails = services.directory / f"fail-at-{where}"
        fails.touch()
        if where == "start":
            os.kill(worker.pid, signal.SIGKILL)
        for words in ("exited with status ", f"at={handler}", f"told to fail at {where}"):
            services.until(lambda told=told, words=words: words in fleet.log.read_text()[told:], what=words)
        fails.unlink()
    assert services.verdict(services.submit("ok")).passed


@pytest.mark.nightly
def test_a_worker_without_a_directory_is_started_later(services: Any, fleet: Any) -> None:
    """The supervisor keeps running although it cannot create the directory."""
    told = len(fleet.log.read_text())
    place = services.config().scratch / "fleet-0"
    aside = place.rename(place.with_name("aside"))
    place.touch()
    os.kill(fleet.live()[0].pid, signal.SIGKILL)
    services.until(lambda: "cannot be started now" in fleet.log.read_text()[told:], what="a failed start")
    place.unlink()
    aside.rename(place)
    assert services.verdict(services.submit("ok")).passed
    assert fleet.process.poll() is None


@pytest.mark.nightly
def test_a_worker_that_is_not_ready_in_time_is_replaced(services: Any, fleet: Any, tmp_path: Path) -> None:
    hangs, log = services.directory / "hang-at-start", tmp_path / "log"
    hangs.touch()
    environment = fleet.environment | {"JUDGES_PATIENCE_S": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "run_fleet.py")], env=environment, stdout=out, stderr=out
        )
    try:
        services.until(lambda: log.read_text().count("has not become ready") == 2, what="the end of patience, twice")
        assert len(set(re.findall("has not become ready.* pid=([0-9]+)", log.read_text()))) == 2
        assert "was killed by SIGKILL" in log.read_text()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        hangs.unlink()


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("fail-at-start", "told to fail at start"),
        pytest.param("hang-at-start", "has not become ready", marks=pytest.mark.nightly),
    ],
)
def test_a_supervisor_ends_if_no_worker_starts(
    services: Any, fleet: Any, tmp_path: Path, how: str, reason: str
) -> None:
    """After three attempts its log ends with the reason, which `kqueue up` shows."""
    fails, log = services.directory / how, tmp_path / "log"
    fails.touch()
    try:
        with log.open("wb") as out:
            command = [sys.executable, str(HERE / "run_fleet.py")]
            environment = fleet.environment | {"JUDGES_PATIENCE_S": "1"}
            done = subprocess.run(command, env=environment, stdout=out, stderr=out, timeout=120, check=False)
    finally:
        fails.unlink()
    assert done.returncode == 1
    said = log.read_text()
    assert len(re.findall(f"(?m)^[0-9].*{reason}", said)) == 3
    assert "no worker has become ready in 3 attempts" in said.splitlines()[-1]


def test_a_worker_that_fails_every_evaluation_is_replaced(services: Any, fleet: Any) -> None:
    """Successive failures of the fleet count, whether a judge reports them or dies, if the fleet's own fail too."""
    (services.directory / "broken").touch()
    [before] = fleet.live()
    failures = ["raise", "exit 1", "raise", "raise", "raise"] * 2
    for kernel in ["ok", *failures[1:], "ok", *failures]:
        assert [worker.id for worker in fleet.live()] == [before.id]
        assert services.verdict(services.submit(kernel)).category == ("passed" if kernel == "ok" else "judge_error")
    services.until(lambda: [worker.id for worker in fleet.live()] not in ([], [before.id]), what="another worker")
    (services.directory / "broken").unlink()
    assert services.verdict(services.submit("ok")).passed


@pytest.mark.parametrize("number", [12, pytest.param(100, marks=pytest.mark.nightly)])
def test_failing_requests_end_no_worker_and_delay_nobody(services: Services, fleet: Fleet, number: int) -> None:
    """While an owner's interactive evaluations fail again and again, another owner's get their verdicts."""
    [before], told = fleet.live(), len(fleet.log.read_text())
    who: dict[str, Any] = {"producer": "hostile", "priority": Priority.INTERACTIVE, "attempts": 10}
    with acting(Viewer(owner="hostile")):
        flood = [services.submit(f"raise {each}", **who) for each in range(number)]
    services.until(lambda: "this worker goes on" in fleet.log.read_text()[told:], what="the fleet's own evaluation")
    with acting(Viewer(owner="other")):
        others = [services.submit(f"ok {each}", producer="other") for each in range(4)]
    verdicts = [services.verdict(identity) for identity in others]
    assert all(verdict.passed for verdict in verdicts)
    between = sum(
        verdicts[-1].submitted_at < attempt.started_at < max(verdict.finished_at for verdict in verdicts)
        for identity in flood
        for attempt in services.attempts(identity)[1:]
    )
    assert between <= 10, between
    assert [worker.id for worker in fleet.live()] == [before.id]
    evaluations.cancel_all(services.engine, flood)


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
    assert [a.written_by for a in Whole(services)(running, attempts=2)] == ["sweeper", "judge"]


def test_a_lease_is_renewed(services: Any, fleet: Any, tmp_path: Path) -> None:
    """An evaluation can run for longer than its first lease."""
    running = services.submit(f"gate {tmp_path / 'gate'}")
    services.started(running)
    [first] = services.attempts(running)
    services.until(lambda: services.attempts(running)[0].lease_until > first.lease_until)
    (tmp_path / "gate").touch()
    Whole(services)(running, attempts=1)


def test_a_warm_stop_lets_the_judge_finish(services: Any, fleet: Any) -> None:
    """After SIGTERM running evaluations end normally, queued ones stay queued, rows are closed, and processes end."""
    pids = [fleet.process.pid, _worker_pid(fleet), *linux.children(_worker_pid(fleet))]
    running, waiting = services.submit("sleep 6"), services.submit("ok")
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
