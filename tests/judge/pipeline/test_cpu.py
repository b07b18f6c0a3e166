"""CPU time of an evaluation: it includes all processes of the evaluation, and none of another one."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable

import pytest

from kqueue.categories import Category
from kqueue.contract import Outcome
from kqueue.evidence import Evidence
from tests.judge.linear import PROBLEM, QUICK, judge, right
from tests.judge.rig import Rig
from tests.waiting import until
from workers.judge.forkserver.orphans import ProcessTree, has_ended
from workers.judge.pipeline.cpu import CpuTime
from workers.judge.sandbox.cgroups import Groups

pytestmark = pytest.mark.slow("uses the CPU for seconds")

#: CPU time in seconds that a kernel or a problem uses in addition to its work.
MUCH = 1.0
BURN = f"""
import os, signal, threading, time
def burn():
    begun = time.thread_time()
    while time.thread_time() - begun < {MUCH}: pass
"""
#: Ways to use that time, as statements that a kernel runs when it is imported.
WAYS = {
    "a thread": "thread = threading.Thread(target=burn); thread.start(); thread.join()",
    "an orphan": """
reader, writer = os.pipe()
if (pid := os.fork()) == 0:
    if os.fork() == 0:
        burn(); os._exit(0)
    os._exit(0)
os.waitpid(pid, 0)
os.close(writer)
os.read(reader, 1)
""",
    "a child that nobody waits for": """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
reader, writer = os.pipe()
if os.fork() == 0:
    burn(); os._exit(0)
os.close(writer)
os.read(reader, 1)
""",
}


def used(outcome: Outcome) -> dict[str, float]:
    assert outcome.evidence.cpu_s is not None
    return outcome.evidence.cpu_s


@pytest.fixture(scope="module")
def usual(rig: Rig) -> dict[str, float]:
    judge(rig, right())
    outcome = judge(rig, right())
    assert outcome.category is Category.PASSED
    return used(outcome)


def test_each_process_has_its_time(usual: dict[str, float]) -> None:
    assert set(usual) == {"judge", "reference", "candidate"}
    assert all(0 < seconds < 60 for seconds in usual.values())
    evidence = Evidence(cpu_s=usual)
    assert Evidence.model_validate_json(evidence.model_dump_json()) == evidence


@pytest.mark.parametrize("way", WAYS)
def test_a_kernel_s_time_is_counted_whoever_uses_it(rig: Rig, usual: dict[str, float], way: str) -> None:
    if way == "a child that nobody waits for" and not counts_groups():
        pytest.skip("without control groups of version 2 Linux does not tell it")
    outcome = judge(rig, right(top=BURN + WAYS[way]))
    assert outcome.category is Category.PASSED, outcome
    more = {name: seconds - usual[name] for name, seconds in used(outcome).items()}
    assert more["candidate"] > MUCH - 0.3
    assert max(more["judge"], more["reference"]) < MUCH / 2


def test_a_process_that_is_killed_is_counted(rig: Rig) -> None:
    outcome = judge(rig, right(top=BURN + "burn(); os.abort()\n"))
    assert outcome.category is Category.CRASHED
    assert used(outcome)["candidate"] > MUCH - 0.3
    settings = QUICK.model_copy(update={"deadlines": QUICK.deadlines.model_copy(update={"load_s": 1.0})})
    outcome = judge(rig, right(top="while True: pass\n"), settings)
    assert outcome.category is Category.TIMEOUT
    assert used(outcome)["candidate"] > 0


def test_a_problem_s_time_is_the_reference_s(rig: Rig, usual: dict[str, float]) -> None:
    first = judge(rig, right(), problem=PROBLEM + BURN + "burn()\n")
    assert first.category is Category.PASSED, first
    assert used(first)["reference"] > usual["reference"] + MUCH - 0.3
    assert used(first)["candidate"] < usual["candidate"] + MUCH / 2


def test_the_judge_s_own_time_begins_with_the_evaluation() -> None:
    spin(time.process_time, 0.2)
    cpu = CpuTime()
    assert cpu.seconds()["judge"] < 0.1
    spin(time.process_time, 0.2)
    assert 0.15 < cpu.seconds()["judge"] < 5


@pytest.mark.parametrize("living", [True, False])
def test_without_groups_processes_are_counted_one_by_one(living: bool) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        if (child := os.fork()) == 0:
            spin(time.process_time, 0.3)
            os._exit(0)
        os.waitpid(child, 0)
        spin(time.process_time, 0.3)
        os.write(writer, b".")
        if living:
            signal.pause()
        os._exit(0)
    os.read(reader, 1)
    sealed = ProcessTree(pid, None, None)
    if living:
        assert 0.5 < sealed.cpu_seconds([]) < 10
        os.kill(pid, signal.SIGKILL)
    until(lambda: has_ended(pid), what="its end")
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    assert os.waitstatus_to_exitcode(sealed.reap(pid)) == (-signal.SIGKILL if living else 0)
    assert 0.5 < sealed.reaped_s < 10
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime > before
    for descriptor in (reader, writer):
        os.close(descriptor)


def spin(clock: Callable[[], float], seconds: float) -> None:
    begun = clock()
    while clock() - begun < seconds:
        pass


def counts_groups() -> bool:
    """Return whether control groups report the CPU time of their processes here."""
    groups = Groups()
    try:
        group = groups.group(1 << 30, 16)
        if group is None:
            return False
        counted = group.cpu_seconds() is not None
        group.remove()
        return counted
    finally:
        groups.close()
