"""One worker with the real judge: ends of attempts, status while running, and reuse after a restart."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.engine import make_url

from kqueue import Client
from kqueue.categories import Category
from kqueue.contract import Deadlines, Settings, Timing
from kqueue.store import reports
from kqueue.store.reports import Why
from tests.chaos.family import name
from tests.chaos.rig import PATIENCE_S, strays, worker_of
from tests.fleet.told import Fleet, Services
from tests.memory import held
from tests.waiting import below
from workers.judge.host import linux
from workers.judge.host.scratch import device_lock

PASSWORD = "marked-0f1e2d3c4b5a"
PROBLEM = """
import os, signal, time
import torch
{once}
class Model(torch.nn.Module):
    def forward(self, x):
        {hostile}
        return torch.relu(x)
def get_inputs():
    return [torch.randn(64)]
def get_init_inputs():
    return []
"""
RIGHT = PROBLEM.format(once="", hostile="pass")
KERNEL = """
import time, torch
class ModelNew(torch.nn.Module):
    def forward(self, x):
        {body}
        return x.clamp(min=0)
"""
UNTIMED: dict[str, Any] = {"checks": 1, "timing": Timing().off()}


@pytest.fixture(scope="module")
def fleet(services: Services, start_fleet: Callable[..., Fleet]) -> Fleet:
    """Start a fleet of one worker, whose settings contain a password that this Postgres does not require."""
    url = make_url(services.postgres.url).set(username="postgres", password=PASSWORD)
    return start_fleet(true=True, reuse=True, log_json=True, database_url=url.render_as_string(hide_password=False))


def test_a_strangers_device_is_told_while_it_lasts(services: Services, fleet: Fleet) -> None:
    """Worker and evaluation name the foreign process and the step until the device is free."""

    def worker() -> Any:
        return fleet.live()[0]

    def why(identity: Any) -> Any:
        return reports.waiting(services.engine, identity, within_s=60)

    with device_lock(Path(fleet.environment["KQUEUE_SCRATCH"]), "cpu").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        identity = services.submit(KERNEL.format(body="pass"), problem=RIGHT, settings=Settings(**UNTIMED))
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


def test_lines_of_the_log_have_the_evaluation(services: Services, fleet: Fleet) -> None:
    """The evaluation is in log lines of its task process and of the fork server that ended the candidate."""
    settings = Settings(max_attempts=1, deadlines=Deadlines(check_s=1), **UNTIMED)
    identity = services.submit(KERNEL.format(body="time.sleep(600)"), problem=RIGHT, settings=settings)
    assert services.verdict(identity, 120).category is Category.TIMEOUT
    loggers = {"workers.app", "workers.judge.forkserver.watch"}

    def mine() -> dict[str, dict[str, Any]]:
        known = [json.loads(line) for line in fleet.log.read_text().splitlines() if line.startswith("{")]
        return {one["logger"]: one for one in known if one.get("evaluation") == str(identity)}

    found = services.until(lambda: mine() if loggers <= {*mine()} else {}, what="lines")
    assert {(found[logger]["attempt"], found[logger]["slot"]) for logger in loggers} == {(1, "cpu-0")}
    assert found["workers.judge.forkserver.watch"]["how"] == "deadline"
    assert found["workers.app"]["category"] == "timeout"


def test_neither_a_judge_nor_what_forks_it_holds_a_credential(services: Services, fleet: Fleet) -> None:
    """Only the worker's parent has the password in memory, but not a judge, its supervisor or the fork server."""
    identity = services.submit(KERNEL.format(body="pass # m"), problem=RIGHT, settings=Settings(**UNTIMED))
    assert services.verdict(identity).passed
    [worker] = fleet.live()
    found = {"kq-worker": held(worker.pid, re.escape(PASSWORD.encode()))}
    for pid in linux.children(worker.pid):
        for process in (pid, *linux.children(pid)):
            if name(process) in ("kq-judge-super", "kq-judge", "kq-forkserver"):
                found[name(process)] = held(process, re.escape(PASSWORD.encode()))
    assert found == {"kq-worker": True, "kq-judge-super": False, "kq-judge": False, "kq-forkserver": False}


@pytest.mark.nightly
def test_a_kernel_is_judged_by_another_worker(services: Services, fleet: Fleet) -> None:
    """Worker, judge and candidate die while the kernel runs, and a second attempt passes.

    The fingerprint of the next worker is the same, so an earlier verdict is reused.
    """
    earlier: dict[str, Any] = {"kernel": KERNEL.format(body="pass # earlier"), "settings": UNTIMED}
    earlier |= {"problem": RIGHT, "backend": "torch", "lane": "cpu"}
    settings = Settings(max_attempts=3, **UNTIMED)
    with Client(services.config(lease_s=4)) as client:
        first = client.evaluate(earlier, timeout=PATIENCE_S)
        assert first.passed
        identity = services.submit(KERNEL.format(body="time.sleep(1)"), problem=RIGHT, settings=settings)
        worker = worker_of(fleet, services.started(identity))
        candidates = services.until(
            lambda: [pid for pid in below(worker) if name(pid) == "kq-candidate"], PATIENCE_S, "the candidate"
        )
        os.kill(worker, signal.SIGKILL)
        services.until(lambda: not any(services.alive(pid) for pid in candidates), what="the candidate's end")
        assert services.verdict(identity, PATIENCE_S).passed
        again = client.evaluate(earlier, timeout=PATIENCE_S)
        assert (again.reused_from, again.attempts) == (first.evaluation_id, 0)
    lost, passed = services.attempts(identity)
    assert (lost.category, passed.category) == ("worker_lost", "passed")
    assert lost.worker_id != passed.worker_id
    services.until(lambda: not strays(), what="no process too many")
    assert len(services.rows("SELECT DISTINCT fingerprint FROM workers WHERE fingerprint IS NOT NULL")) == 1
