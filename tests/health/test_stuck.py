"""Processes that survive SIGKILL block their slot, but no process waits for them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from kqueue import broker
from kqueue.store import evaluations
from tests.fleet.told import Fleet, renewing
from tests.waiting import until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

#: The freezer of control groups, version 1. A frozen process dies only after it thaws. In version 2 it dies at once.
_FREEZER = Path("/sys/fs/cgroup/freezer")


class Freezer:
    """Freezes processes so that not even SIGKILL ends them, like a hanging driver."""

    def __init__(self) -> None:
        self._group = _FREEZER / f"kqueue-test-{uuid4().hex[:8]}"
        try:
            self._group.mkdir()
            (self._group / "freezer.state").write_text("THAWED")
        except OSError as error:
            pytest.skip(f"no process can be frozen here: {error}")

    def freeze(self, pid: int) -> None:
        (self._group / "cgroup.procs").write_text(str(pid))
        (self._group / "freezer.state").write_text("FROZEN")
        until(lambda: (self._group / "freezer.state").read_text().strip() == "FROZEN", what="the ice")

    def thaw(self) -> None:
        (self._group / "freezer.state").write_text("THAWED")

    def close(self) -> None:
        self.thaw()
        until(lambda: not (self._group / "cgroup.procs").read_text(), what="the end of what was frozen")
        self._group.rmdir()


@pytest.fixture
def freezer() -> Iterator[Freezer]:
    """Return an empty freezer, and thaw its processes at the end."""
    made = Freezer()
    yield made
    made.close()


@pytest.fixture(scope="module")
def running_fleet(start_fleet: Callable[..., Fleet]) -> Callable[[], Fleet]:
    """Return the module's fleet of two workers. If a test has ended it, start another first."""
    return renewing(partial(start_fleet, slots=2))


def _judge(services: Any, tmp_path: Path, **options: Any) -> tuple[Any, int]:
    file = tmp_path / uuid4().hex
    evaluation = services.submit(f"write {file} 120", **options)
    return evaluation, int(until(lambda: file.exists() and file.read_text(), what="the judge"))


def _paused(fleet: Any) -> list[str]:
    return [worker.paused for worker in fleet.live() if worker.paused]


def test_a_judge_that_does_not_die_blocks_its_slot_alone(
    services: Any, fleet: Any, freezer: Freezer, tmp_path: Path
) -> None:
    """The evaluation ends at the hard limit, and the worker pauses until the thaw while the other slot goes on."""
    evaluation, judge = _judge(services, tmp_path, time_limit=3)
    freezer.freeze(judge)
    assert services.verdict(evaluation).category == "judge_error"
    services.until(lambda: _paused(fleet) == ["a process that it killed does not die"], what="a worker that pauses")
    assert services.alive(judge)
    others = [services.submit("ok") for _ in range(4)]
    # The pausing worker has possibly taken one, which the next sweep finds, so start that sweep now.
    time.sleep(1)
    with services.redis() as client:
        client.delete("kqueue.sweeper")
    for identity in others:
        assert services.verdict(identity).passed
    freezer.thaw()
    services.until(lambda: not _paused(fleet), what="a worker that goes on")
    both = [services.submit(f"gate {tmp_path / 'gate'}") for _ in range(2)]
    for identity in both:
        services.started(identity)
    (tmp_path / "gate").touch()
    for identity in both:
        assert services.verdict(identity).passed


def test_a_slot_is_not_used_again_while_its_last_life_is_there(
    services: Any, fleet: Any, freezer: Freezer, tmp_path: Path
) -> None:
    """The evaluation of a killed worker with a stuck judge moves to another worker, and the row names the judge."""
    evaluation, judge = _judge(services, tmp_path, attempts=2)
    first = services.started(evaluation).worker_id
    freezer.freeze(judge)
    [worker] = [worker for worker in fleet.live() if worker.id == first]
    os.kill(worker.pid, signal.SIGKILL)

    def stuck() -> list[Any]:
        sql = (
            "SELECT paused FROM workers WHERE id = :id AND stopped_at IS NULL AND heartbeat_at > now() - interval '5 s'"
        )
        return [row.paused for row in services.rows(sql, id=first) if row.paused]

    assert services.until(stuck, what="a stuck slot") == [f"killed processes do not die: {judge}"]
    again = services.until(lambda: [a for a in services.attempts(evaluation) if a.number == 2], what="another attempt")
    assert again[0].worker_id != first
    time.sleep(3)
    assert [worker.id for worker in fleet.live()] == [again[0].worker_id]
    freezer.thaw()
    services.until(lambda: len(fleet.live()) == 2 and not stuck(), 90, "the slot's next life")
    evaluations.cancel(services.engine, evaluation)
    broker.revoke(services.app, evaluation)


def test_a_fleet_ends_although_something_of_it_does_not(
    services: Any, fleet: Any, freezer: Freezer, tmp_path: Path
) -> None:
    """A quick stop hands the evaluation back without counting a try, and leaves the stuck process."""
    evaluation, judge = _judge(services, tmp_path)
    freezer.freeze(judge)
    assert fleet.stop(signal.SIGINT) == 0
    assert services.alive(judge)
    [attempt] = services.attempts(evaluation)
    assert attempt.handed_back
    assert services.rows("SELECT state FROM evaluations WHERE id = :id", id=evaluation)[0].state == "queued"
    evaluations.cancel(services.engine, evaluation)
