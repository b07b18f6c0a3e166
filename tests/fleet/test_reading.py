"""A child ends after it has judged. After static checks only, it takes the next task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kqueue.store import evaluations
from workers.judge.host import linux

#: Number of a worker's children until they have judged.
CHILDREN = 2


def _read(services: Any, file: Path, how: str = "well") -> Any:
    return services.verdict(services.submit(f"read {file} {how}"))


def _pids(file: Path) -> list[int]:
    return [int(line) for line in file.read_text().split()]


def test_a_child_that_has_only_read_takes_the_next_task(services: Any, fleet: Any, tmp_path: Path) -> None:
    """Static failures need no fork, and each has its own verdict and one attempt."""
    verdicts = [_read(services, tmp_path / "pids") for _ in range(4)]
    assert [(v.category, v.attempts, v.written_by) for v in verdicts] == [("entry_point_missing", 1, "judge")] * 4
    assert len(set(_pids(tmp_path / "pids"))) <= CHILDREN


def test_a_child_that_has_judged_takes_no_other_task(services: Any, fleet: Any, tmp_path: Path) -> None:
    """Each executed kernel has a separate process, whatever that process has read before."""
    judges: list[int] = []
    for _ in range(2):
        assert services.verdict(services.submit(f"write {tmp_path / 'judge'} 0")).passed
        judges.append(int((tmp_path / "judge").read_text()))
        for _ in range(2):
            _read(services, tmp_path / "pids")
        assert not set(judges) & set(_pids(tmp_path / "pids")[-2:])
    assert len(set(judges)) == 2


def test_a_spare_child_takes_the_next_task(services: Any, fleet: Any, tmp_path: Path) -> None:
    """A spare child waits while another one judges, so that no fork is needed between two kernels."""
    running = services.submit(f"gate {tmp_path / 'gate'}")
    services.started(running)
    worker = fleet.live()[0].pid

    def judges() -> list[int]:
        return [pid for pid in linux.children(worker) if "sleep" not in Path(f"/proc/{pid}/comm").read_text()]

    services.until(lambda: len(judges()) == CHILDREN, what="the spare child")
    before = judges()
    following = services.submit(f"write {tmp_path / 'judge'} 0")
    (tmp_path / "gate").touch()
    assert services.verdict(following).passed
    assert services.verdict(running).passed
    assert int((tmp_path / "judge").read_text()) in before


def test_messages_in_vain_use_no_child_up(services: Any, fleet: Any, tmp_path: Path) -> None:
    """Messages of finished and unknown evaluations need no fork."""
    _read(services, tmp_path / "pids")
    # One after the other, because the sweeper sends an evaluation that has waited without a message for a while.
    done = services.submit(f"read {tmp_path / 'pids'} well", send=False)
    evaluations.cancel(services.engine, done)
    for _ in range(3):
        services.send(done)
        _read(services, tmp_path / "pids")
    assert len(set(_pids(tmp_path / "pids"))) <= CHILDREN
    assert services.attempts(done) == []


def test_reading_that_went_wrong_uses_a_child_up(services: Any, fleet: Any, tmp_path: Path) -> None:
    """A source that kills its reader is recorded like any death of a judge, and another process reads the next one."""
    deaths = {"null": "judge_error", "signal SIGKILL": "worker_lost", "sysexit 3": "judge_error"}
    for number, (how, category) in enumerate(deaths.items()):
        file = tmp_path / f"pids-{number}"
        assert _read(services, file, how).category == category
        assert {_read(services, file).category for _ in range(2)} == {"entry_point_missing"}
        first, *others = _pids(file)
        assert first not in others


def test_a_cancelled_reading_ends_at_once(services: Any, fleet: Any, tmp_path: Path) -> None:
    """A reading child is killed like a judging one, and another child takes the next task."""
    evaluation = services.submit(f"read {tmp_path / 'pids'} gil")
    services.started(evaluation)
    services.app.control.revoke(str(evaluation), terminate=True, signal="SIGKILL")
    assert services.verdict(evaluation).category == "cancelled"
    assert _read(services, tmp_path / "pids").category == "entry_point_missing"
    services.until(lambda: not services.rows("SELECT 1 FROM attempts WHERE ended_at IS NULL"), what="no open attempt")
