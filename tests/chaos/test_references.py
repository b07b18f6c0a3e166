"""References in a fleet with the real judge: whose failure the end of one is."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kqueue import Client
from kqueue.categories import Category
from kqueue.config import load
from kqueue.contract import Settings, Timing
from kqueue.local.fleet import LocalFleet
from tests.chaos.family import below, name
from tests.services import starts_services

PROBLEM = """
import os, signal, time
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        {hostile}
        return x * 2 + 1
def get_inputs():
    return [torch.randn(4, 4)]
"""
KERNEL = """
import torch
class ModelNew(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1
"""
SETTINGS = Settings(checks=1, timing=Timing(enabled=False))


@pytest.fixture(scope="module")
@starts_services
def kq() -> Iterator[Client]:
    """A client of a fleet with one slot."""
    with tempfile.TemporaryDirectory(prefix="kqueue-test-") as place:
        root = Path(place)
        root.chmod(0o711)  # closed folders would be closed to sealed processes
        config = load(home=root / "home", scratch=root / "scratch", gpus="none", cpu_slots=1)
        with LocalFleet(config, durable=False) as fleet, fleet.client() as client:
            yield client


def references() -> list[int]:
    """The references that run below this process, those of other tests' fleets among them."""
    return [pid for pid in below(os.getpid()) if name(pid) == "kq-reference"]


@pytest.mark.timeout(300)
def test_a_reference_that_is_killed_from_outside_is_tried_again(kq: Client) -> None:
    """The attempt ends as ``worker_lost``, the next one passes."""
    problem = PROBLEM.format(hostile="time.sleep(3)")
    others = references()
    ticket = kq.submit(problem=problem, kernel=KERNEL, backend="torch", lane="cpu", settings=SETTINGS)
    deadline = time.monotonic() + 60
    while not (found := [pid for pid in references() if pid not in others]) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(found[0], signal.SIGKILL)
    verdict = ticket.wait(timeout=120)
    assert (verdict.category, verdict.attempts) == (Category.PASSED, 2)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("hostile", ["os.kill(os.getpid(), signal.SIGKILL)", "os.abort()", "os._exit(0)"])
def test_a_reference_that_ends_itself_is_judged_once(kq: Client, hostile: str) -> None:
    """It cannot look as if somebody else had killed it: its problem is to blame, and nothing is tried again."""
    problem = PROBLEM.format(hostile=hostile)
    verdict = kq.submit(problem=problem, kernel=KERNEL, backend="torch", lane="cpu", settings=SETTINGS).wait(
        timeout=120
    )
    assert (verdict.category, verdict.attempts) == (Category.REFERENCE_ERROR, 1)
