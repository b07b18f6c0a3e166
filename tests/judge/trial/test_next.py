"""Candidates that are made ahead: who gets one, and that nobody is judged otherwise by it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from kqueue.categories import Category
from kqueue.contract import Backend, Limits, Outcome, Request, Settings, Timing
from tests.judge import extension
from tests.judge.extension import PROBLEM
from tests.judge.rig import Rig
from tests.waiting import until
from workers.judge.gpu.booking import Ledger
from workers.judge.sandbox.seal import Role

pytestmark = [
    pytest.mark.slow("judges kernels one after the other"),
    pytest.mark.skipif(os.getuid() != 0, reason="a fleet that is not root keeps nothing"),
]

#: Tells which process it runs in, and which files it found there.
KERNEL = """
import os
import torch
print("ran in", os.getpid(), sorted(os.listdir()))
class ModelNew(torch.nn.Module):
    def forward(self, x):
        return x * 2
"""
QUICK = Settings(checks=2, timing=Timing(enabled=False))


def request(kernel: str = KERNEL, settings: Settings = QUICK, problem: str = PROBLEM) -> Request:
    return Request(problem=problem, kernel=kernel, backend=Backend.TORCH, settings=settings)


def ran_in(outcome: Outcome) -> int:
    [line] = [line for line in outcome.log.splitlines() if line.startswith("ran in")]
    return int(line.split()[2])


def waiting(rig: Rig) -> int:
    until(lambda: len(rig.sealed(Role.CANDIDATE)) == 1, what="a candidate that waits")
    [pid] = rig.sealed(Role.CANDIDATE)
    return pid


@pytest.fixture
def made(keeping: Rig) -> int:
    """The candidate that an earlier evaluation had made."""
    if not keeping.sealed(Role.CANDIDATE):
        assert keeping.judge(request()).passed
    return waiting(keeping)


@pytest.mark.parametrize(("body", "category"), [("x * 2", Category.PASSED), ("os._exit(3)", Category.CRASHED)])
def test_each_serves_one_kernel_and_leaves_another(keeping: Rig, made: int, body: str, category: Category) -> None:
    assert not (Path(f"/proc/{made}/cwd") / "kernel.py").exists()
    outcome = keeping.judge(request(KERNEL.replace("x * 2", body)))
    assert (outcome.category, ran_in(outcome)) == (category, made)
    assert "'kernel.py'" in outcome.log
    following = waiting(keeping)
    assert following != made
    again = keeping.judge(request(KERNEL.replace("x * 2", "x + 1"), problem=PROBLEM.replace("x * 2", "x + 1")))
    assert (again.category, ran_in(again)) == (Category.PASSED, following)


def test_one_with_other_limits_is_not_taken(keeping: Rig, made: int) -> None:
    """It is ended, because the new one gets its uid."""
    outcome = keeping.judge(request(settings=QUICK.model_copy(update={"limits": Limits(processes=100)})))
    assert outcome.category is Category.PASSED
    assert ran_in(outcome) != made
    assert made not in keeping.sealed(Role.CANDIDATE)


def test_after_the_problem_s_failure_none_is_made(keeping: Rig, made: int) -> None:
    """The one that waited ends with that evaluation. A kernel that is settled by reading leaves it."""
    assert keeping.judge(request("def")).category is Category.SYNTAX_ERROR
    assert keeping.sealed(Role.CANDIDATE) == [made]
    outcome = keeping.judge(request(problem=PROBLEM.replace("x * 2", "undefined")))
    assert outcome.category is Category.REFERENCE_ERROR
    until(lambda: not keeping.sealed(Role.CANDIDATE), what="its end")


def test_one_that_was_killed_meanwhile_is_not_taken(keeping: Rig, made: int) -> None:
    os.kill(made, signal.SIGKILL)
    until(lambda: not keeping.sealed(Role.CANDIDATE), what="its end")
    outcome = keeping.judge(request())
    assert outcome.category is Category.PASSED
    assert ran_in(outcome) != made


def test_it_makes_room_where_memory_is_wanted(keeping: Rig, made: int) -> None:
    ledger = Ledger(keeping.place.ledger, 1)
    with ledger.book(1, label="large", wait_s=0):
        ledger.want_room()
    until(lambda: not keeping.sealed(Role.CANDIDATE), what="its end")


def test_libraries_of_a_builder_reach_it(keeping: Rig) -> None:
    assert extension.judge(keeping, extension.kernel()).category is Category.PASSED
    for place in ("builder", "store"):
        pid = waiting(keeping)
        outcome = extension.judge(keeping, extension.kernel(after="print('ran in', os.getpid(), WHO)"))
        assert outcome.category is Category.PASSED, outcome
        assert outcome.evidence.build is not None
        assert outcome.evidence.build.where == place
        assert f"ran in {pid} candidate" in outcome.log
