"""The log of a real fleet names the evaluation that each process works on."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from kqueue.categories import Category
from kqueue.contract import Deadlines, Settings, Timing
from tests.fleet.told import Fleet, Services
from tests.waiting import until

PROBLEM = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return x + 1
def get_inputs():
    return [torch.randn(64)]
def get_init_inputs():
    return []
"""
ENDLESS = "import time, torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        time.sleep(600)\n"


def test_lines_have_the_evaluation(services: Services, start_fleet: Callable[..., Fleet]) -> None:
    """The clerk's, and the fork server's that ended the candidate; no process that reads no settings logs otherwise."""
    fleet = start_fleet(true=True, log_json=True)
    settings = Settings(max_attempts=1, checks=1, deadlines=Deadlines(check_s=1), timing=Timing(enabled=False))
    identity = services.submit(ENDLESS, problem=PROBLEM, settings=settings)
    assert services.verdict(identity, 120).category is Category.TIMEOUT

    def mine() -> dict[str, dict[str, Any]]:
        known = [json.loads(line) for line in fleet.log.read_text().splitlines() if line.startswith("{")]
        return {one["logger"]: one for one in known if one.get("evaluation") == str(identity)}

    found = until(
        lambda: mine() if {"workers.app", "workers.judge.keeper.forkserver"} <= {*mine()} else {}, what="lines"
    )
    for logger in ("workers.app", "workers.judge.keeper.forkserver"):
        assert found[logger]["attempt"] == 1
        assert found[logger]["slot"] == "cpu-0"
    assert (found["workers.judge.keeper.forkserver"]["how"], found["workers.app"]["category"]) == (
        "deadline",
        "timeout",
    )
