"""A device that a process outside of the fleet has: whoever waits for it is told who, and for how long, meanwhile.

And the step that an evaluation is at meanwhile.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kqueue.store import reports
from kqueue.store.reports import Why
from tests.fleet.told import Fleet, Services
from workers.judge.host.scratch import device_lock

PROBLEM = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x)

def get_inputs():
    return [torch.randn(64)]

def get_init_inputs():
    return []
"""
KERNEL = "import torch\n\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        return x.clamp(min=0)\n"


def test_a_strangers_device_is_told_while_it_lasts(services: Services, start_fleet: Callable[..., Fleet]) -> None:
    """Worker and evaluation name the process, and the step; they forget the process when the device is free."""
    fleet = start_fleet(true=True)

    def worker() -> Any:
        return fleet.live()[0]

    def why(identity: Any) -> Any:
        return reports.waiting(services.engine, identity, within_s=5)

    with device_lock(Path(fleet.environment["KQUEUE_SCRATCH"]), "cpu").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        identity = services.submit(KERNEL, problem=PROBLEM)
        services.until(lambda: worker().waits_for, what="the row")
        assert f"process {os.getpid()} " in worker().waits_for
        assert worker().busy_with == identity
        assert worker().busy_since <= worker().waits_since
        services.until(lambda: worker().step == "wait_for_device", what="the step")
        [attempt] = reports.show(services.engine, identity).attempts
        assert attempt.step == "wait_for_device"
        waiting = why(identity)
        assert waiting.why is Why.DEVICE
        assert f"{worker().name} runs it" in waiting.message
        assert worker().waits_for in waiting.message
    verdict = services.verdict(identity)
    assert verdict.passed, verdict.message
    services.until(lambda: services.rows("SELECT 1 FROM workers WHERE waits_for IS NULL AND waits_since IS NULL"), 30)
    assert (worker().waits_for, worker().waits_since, why(identity), worker().step) == (None, None, None, None)
