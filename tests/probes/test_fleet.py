"""Probes on real fleets with real judges: an honest one goes on, a broken one is paused within minutes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import text

from kqueue.categories import Category
from kqueue.contract import Settings
from kqueue.states import Finding, ProbeKind
from kqueue.store import evaluations, probes
from tests.fleet.told import Fleet, Services

pytestmark = pytest.mark.timeout(400)

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
KERNEL = """
import torch
class ModelNew(torch.nn.Module):
    def forward(self, x):
        return x.clamp(min=0)
"""


@pytest.fixture(autouse=True)
def _none_of_others(services: Services) -> None:
    """Forget what fleets before have submitted by themselves: the next one would be paused for what they judged."""
    probes.resume(services.engine, os.uname().nodename)
    evaluations.cancel_all(services.engine, [row.evaluation_id for row in services.rows("SELECT * FROM probes")])
    with services.engine.begin() as connection:
        connection.execute(text("DELETE FROM probes"))


def submit(services: Services) -> Any:
    """Somebody's evaluation."""
    settings = Settings.model_validate({"checks": 1, "timing": {"enabled": False}})
    return services.submit(KERNEL, problem=PROBLEM, settings=settings)


def found(services: Services, **values: Any) -> list[Any]:
    """The probes that were settled, the latest first."""
    where = " AND ".join(["finding IS NOT NULL", *(f"{name} = :{name}" for name in values)])
    return services.rows(f"SELECT * FROM probes WHERE {where} ORDER BY settled_at DESC", **values)


def told(fleet: Fleet, *arguments: str) -> Any:
    """What a command of `kqueue` says in JSON."""
    command = [sys.executable, "-m", "kqueue", *arguments, "--json"]
    done = subprocess.run(command, env=fleet.environment, capture_output=True, text=True, check=True, timeout=120)
    return [json.loads(line) for line in done.stdout.splitlines()]


def paused(fleet: Fleet) -> list[str]:
    """Why this fleet's workers pause."""
    return [worker.paused for worker in fleet.live() if worker.paused]


@pytest.mark.nightly
def test_an_honest_fleet_agrees(services: Services, start_fleet: Callable[..., Fleet]) -> None:
    """Of all kinds; while others' work goes on, which is judged as ever; and none comes when nobody works."""
    fleet = start_fleet(true=True, probe_share=0.5)
    services.until(lambda: fleet.live(), what="the worker")
    assert services.rows("SELECT count(*) AS n FROM probes")[0].n == 0
    ids = [probes.submit(services.engine, "cpu", kind) for kind in ProbeKind]
    mine = []

    def drawn() -> bool:
        """Whether the fleet has submitted one by itself, among the work of somebody."""
        if not any(evaluations.verdict(services.engine, one) is None for one in mine):
            mine.append(submit(services))
        return any(row.evaluation_id not in ids for row in found(services))

    services.until(drawn, 180, "a probe among the work")
    services.until(lambda: len(found(services)) > len(ProbeKind), 180, "what they came to")
    rows = found(services)
    assert {row.kind for row in rows} == set(ProbeKind)
    assert {row.finding for row in rows} == {Finding.AGREED}, [row.words for row in rows]
    assert {row.device for row in rows} == {"cpu"}
    assert {services.verdict(one).category for one in mine} == {Category.PASSED}
    assert paused(fleet) == []
    [record] = told(fleet, "status")
    assert (record["probes"]["cheats_accepted"], record["probes"]["honest_refused"]) == (0, 0)
    assert record["probes"]["judged"] >= len(ProbeKind)
    assert {row["evaluation_id"] for row in told(fleet, "results", "--limit", "1000")} == {str(one) for one in mine}
    fleet.stop(signal.SIGTERM)


@pytest.mark.nightly
def test_a_fleet_that_compares_nothing_is_paused(services: Services, start_fleet: Callable[..., Fleet]) -> None:
    """By the first cheat that passes; what it judged since is named; an operator lets it go on."""
    doubted = submit(services)
    fleet = start_fleet(broken="compares_nothing", probe_share=0.5)
    assert services.verdict(doubted).passed
    probes.submit(services.engine, "cpu", ProbeKind.CHEAT)
    [reason] = services.until(lambda: paused(fleet), 180, "the pause")
    assert "a cheat passed" in reason
    [record] = told(fleet, "status")
    [pause] = record["probes"]["pauses"]
    assert (pause["finding"], pause["device"]) == ("cheat_accepted", "cpu")
    assert str(doubted) in {row["evaluation_id"] for row in told(fleet, "probe", "doubted", str(pause["id"]))}
    waits = submit(services)
    services.until(lambda: "worker pauses" in fleet.log.read_text(), what="the log")
    assert services.attempts(waits) == []
    assert told(fleet, "probe", "resume", pause["host"]) == [{"host": pause["host"], "resumed": 1}]
    assert services.verdict(waits).passed
    fleet.stop(signal.SIGTERM)


def test_a_fleet_whose_clock_is_skewed_is_paused(services: Services, start_fleet: Callable[..., Fleet]) -> None:
    """By the second spin that is timed at less than it took, which the fleet submits by itself."""
    fleet = start_fleet(broken="halves_times", probe_share=0.5)
    first = probes.submit(services.engine, "cpu", ProbeKind.SPIN)
    [reason] = services.until(lambda: paused(fleet), 240, "the pause")
    assert "a spin of" in reason
    rows = [row for row in found(services, finding=Finding.CLOCK_SHORT) if row.worker in reason]
    assert [row.confirms for row in rows] == [True, False]
    assert rows[-1].evaluation_id == first
    assert all(row.bias == pytest.approx(-0.5, abs=0.2) for row in rows)
    probes.resume(services.engine, os.uname().nodename)
    fleet.stop(signal.SIGTERM)
