"""Pauses of the fleet and signals from outside are not blamed on a kernel or a problem."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kqueue.categories import Category
from kqueue.contract import Deadlines, Outcome, Phase
from kqueue.evidence import Facts
from tests.judge.linear import QUICK, judge, right
from tests.judge.rig import Rig
from tests.waiting import proc, until
from workers.judge.forkserver.control import End, Report
from workers.judge.host import linux
from workers.judge.pipeline import blame

#: Statement that creates the file ``asleep``, which shows that foreign code runs, and sleeps.
ASLEEP = "import os, time; os.path.exists('asleep') or (open('asleep', 'w').close(), time.sleep({seconds}))"
DEADLINE_S = 3.0


@pytest.mark.slow("stops a fleet for longer than a deadline")
def test_a_pause_of_all_is_charged_to_nobody(rig: Rig) -> None:
    settings = QUICK.model_copy(update={"checks": 1, "deadlines": Deadlines(check_s=DEADLINE_S)})
    others = set(linux.children(os.getpid()))
    with ThreadPoolExecutor(1) as thread:
        outcome = thread.submit(judge, rig, right(ASLEEP.format(seconds=0.4)), settings)
        until(lambda: asleep(rig))
        judges = set(linux.children(os.getpid())) - others
        judges |= {judge for supervisor in judges for judge in linux.children(supervisor)}
        fleet = [*linux.children(rig.forkserver.pid), *judges, rig.forkserver.pid]
        for pid in fleet:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(DEADLINE_S + 0.1)
        for pid in reversed(fleet):
            os.kill(pid, signal.SIGCONT)
        assert outcome.result(60).category is Category.PASSED, outcome.result()


def test_a_kernel_that_is_killed_from_outside_has_not_crashed(rig: Rig) -> None:
    with ThreadPoolExecutor(1) as thread:
        outcome = thread.submit(judge, rig, right(ASLEEP.format(seconds=60)))
        until(lambda: asleep(rig))
        for pid in linux.children(rig.forkserver.pid):
            if proc(pid, "comm") == "kq-candidate\n":
                os.kill(pid, signal.SIGKILL)
        assert outcome.result(60).category is Category.WORKER_LOST
        assert outcome.result().facts.signal == "SIGKILL"


@pytest.mark.parametrize("where", ["top", "body"])
def test_a_kernel_cannot_kill_itself_as_others_would(rig: Rig, where: str) -> None:
    """The filter refuses SIGKILL to itself, so its end is not mistaken for the fleet's failure."""
    if rig.forkserver.isolation["seccomp"] is not True:
        pytest.skip("system calls are not filtered here")
    statement = "import os; os.kill(os.getpid(), 9)"
    outcome = judge(rig, right(statement) if where == "body" else right(top=statement + "\n"))
    assert outcome.category is (Category.RUNTIME_ERROR if where == "body" else Category.IMPORT_ERROR)
    assert outcome.facts.exception == "builtins.PermissionError"


def asleep(rig: Rig) -> list[Path]:
    # Each process can have a file system that is reachable only by its own path.
    marks = (Path(f"/proc/{pid}/cwd/asleep") for pid in linux.children(rig.forkserver.pid))
    return [mark for mark in marks if mark.exists()]


def test_who_ends_by_sigkill_alone_has_crashed_unless_it_was_others() -> None:
    assert category(End.EXITED, alone=False) is Category.WORKER_LOST
    assert category(End.EXITED, alone=True) is Category.CRASHED
    assert category(End.EXITED, alone=True, phase=Phase.REFERENCE) is Category.REFERENCE_ERROR
    assert category(End.KILLED, alone=True) is Category.WORKER_LOST


def category(reason: End, *, alone: bool, phase: Phase = Phase.CHECK) -> Category:
    facts = Facts(reason=reason, signal="SIGKILL")
    outcome = Outcome(category=Category.WORKER_LOST, message="killed", phase=phase, facts=facts)
    return blame.settle(outcome, [report()], alone=alone).category


def test_what_fails_for_want_of_the_host_s_memory_is_the_fleet_s_failure() -> None:
    """A compile error is the fleet's failure if Linux killed the compiler, and a correct answer stays correct."""
    refused = Outcome(category=Category.COMPILE_ERROR, message="no", phase=Phase.LOAD, facts=Facts(exception="E"))
    settled = blame.settle(refused, [report(), report(robbed=True)], alone=False)
    assert (settled.category, settled.facts.instead_of) == (Category.WORKER_LOST, Category.COMPILE_ERROR)
    assert blame.settle(refused, [report()], alone=False) is refused
    passed = Outcome(category=Category.PASSED, message="right")
    assert blame.settle(passed, [report(robbed=True)], alone=False) is passed


def report(*, robbed: bool = False) -> Report:
    return Report(End.STOPPED, "check", 9, 0, 0, 0, "", robbed=robbed)
