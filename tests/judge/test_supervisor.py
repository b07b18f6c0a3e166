"""A judge that serves many evaluations, and the judge supervisor that forks one judge after the other."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from kqueue.categories import Category
from kqueue.contract import Request
from tests.judge.linear import PROBLEM, QUICK, right
from tests.judge.rig import Rig
from tests.waiting import until
from workers.judge import supervisor
from workers.judge.api import Judges
from workers.judge.backend import InMemoryBackend
from workers.judge.deaths import JudgeDied
from workers.judge.host import linux

pytestmark = pytest.mark.slow("judges many kernels")

BAD = "x = 1\n"


def judge(judges: Judges, kernel: str) -> Category:
    request = Request(problem=PROBLEM, kernel=kernel, backend="torch", settings=QUICK)
    return judges.judge(request, judges.forkserver.slot, InMemoryBackend()).category


def sitting(judges: Judges) -> int:
    until(lambda: len(linux.children(judges.pid)) == 1)
    return linux.children(judges.pid)[0]


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_one_judge_serves_many(judges: Judges) -> None:
    """The number of descriptors of judge, supervisor and fork server does not grow, however a kernel ends."""
    kernels = {
        right(): Category.PASSED,
        right("import os; os._exit(1)"): Category.CRASHED,
        right("return x"): Category.WRONG_OUTPUT_STRUCTURE,
        BAD: Category.ENTRY_POINT_MISSING,
    }
    found = [judge(judges, kernel) for kernel in kernels]
    first, held = sitting(judges), descriptors(sitting(judges))
    of_supervisor, of_server = descriptors(judges.pid), descriptors(judges.forkserver.pid)
    found += [judge(judges, kernel) for kernel in kernels]
    assert found == list(kernels.values()) * 2
    assert sitting(judges) == first
    assert descriptors(first) <= held + 1
    until(lambda: descriptors(judges.pid) <= of_supervisor)
    until(lambda: descriptors(judges.forkserver.pid) <= of_server)


def test_who_asks_a_judge_that_leaves_gets_the_next_one(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """No evaluation is lost if a judge exits after its last one."""
    monkeypatch.setattr(supervisor, "_MOST_USES", 1)
    standing = Judges(rig.forkserver)
    pids: set[int] = set()
    try:
        for _ in range(6):
            assert judge(standing, BAD) is Category.ENTRY_POINT_MISSING
            pids |= set(linux.children(standing.pid))
        assert judge(standing, right()) is Category.PASSED
        assert len(pids) > 1
        assert standing.alive()
    finally:
        standing.leave()


def test_a_judge_that_has_come_to_hold_more_makes_room(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_MORE_HOST_BYTES", -(1 << 40))
    standing = Judges(rig.forkserver)
    try:
        first = sitting(standing)
        assert [judge(standing, right()) for _ in range(2)] == [Category.PASSED] * 2
        assert sitting(standing) != first
    finally:
        standing.leave()


def test_a_judge_whose_asker_failed_is_ended(judges: Judges) -> None:
    first = sitting(judges)

    class Broken(InMemoryBackend):
        def environment(self, facts: dict[str, Any]) -> str:
            raise RuntimeError("there is no record to be had")

    request = Request(problem=PROBLEM, kernel=right(), backend="torch", settings=QUICK)
    with pytest.raises(RuntimeError, match="no record"):
        judges.judge(request, judges.forkserver.slot, Broken())
    until(lambda: first not in linux.children(judges.pid))
    assert judge(judges, right()) is Category.PASSED


def test_a_judge_that_is_killed_while_it_waits_costs_nothing(judges: Judges) -> None:
    killed = sitting(judges)
    os.kill(killed, signal.SIGKILL)
    until(lambda: killed not in linux.children(judges.pid))
    assert judge(judges, right()) is Category.PASSED


def test_a_request_to_a_supervisor_that_is_gone_fails(judges: Judges) -> None:
    os.kill(judges.pid, signal.SIGKILL)
    until(lambda: linux.is_zombie(judges.pid))
    with pytest.raises(JudgeDied):
        judge(judges, right())


def test_the_judge_itself_holds_the_room(judges: Judges) -> None:
    """The judge holds the lock, so the device stays locked while a driver delays the judge's death."""
    slot = judges.forkserver.slot
    holders: set[int] = set()

    class Looking(InMemoryBackend):
        def environment(self, facts: dict[str, Any]) -> str:
            inode = str(slot.lock.with_suffix(".room").stat().st_ino)
            locks = (line.split() for line in Path("/proc/locks").read_text().splitlines())
            holders.update(int(lock[4]) for lock in locks if lock[5].rpartition(":")[2] == inode)
            return super().environment(facts)

    request = Request(problem=PROBLEM, kernel=right(), backend="torch", settings=QUICK)
    assert judges.judge(request, slot, Looking()).category is Category.PASSED
    assert holders == {sitting(judges)}
