"""Probes on real fleets: a correct one goes on, a broken one is paused."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import text

from kqueue.categories import Category
from kqueue.contract import Settings
from kqueue.features.probes import fleet as probes
from kqueue.states import Finding, ProbeKind
from kqueue.store import evaluations
from tests.cli.command import Cli
from tests.fleet.fixtures import *  # noqa: F403
from tests.fleet.told import Fleet, Services
from tests.samples import RELU, RELU_KERNEL

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(autouse=True)
def _none_of_others(services: Services) -> None:
    """Delete the probes of earlier fleets, whose verdicts would pause the next one, and their schedule."""
    probes.resume(services.engine, os.uname().nodename)
    evaluations.cancel_all(services.engine, [row.evaluation_id for row in services.rows("SELECT * FROM probes")])
    with services.engine.begin() as connection:
        connection.execute(text("DELETE FROM probes"))
        connection.execute(text("DELETE FROM probe_lanes"))


def submit(services: Services) -> Any:
    settings = Settings.model_validate({"checks": 1, "timing": {"purpose": "check"}})
    return services.submit(RELU_KERNEL.format("return x.clamp(min=0)"), problem=RELU, settings=settings)


def found(services: Services, **values: Any) -> list[Any]:
    where = " AND ".join(["finding IS NOT NULL", *(f"{name} = :{name}" for name in values)])
    return services.rows(f"SELECT * FROM probes WHERE {where} ORDER BY settled_at DESC", **values)


def told(fleet: Fleet, *arguments: str) -> Any:
    return Cli(fleet.services.directory, fleet.environment).told(*arguments)


def paused(fleet: Fleet) -> list[str]:
    return [worker.paused for worker in fleet.live() if worker.paused]


@pytest.mark.nightly
def test_an_honest_fleet_agrees(services: Services, start_fleet: Callable[..., Fleet]) -> None:
    """All kinds of probes agree during ordinary work, which is judged as usual, and without work there are none."""
    fleet = start_fleet(true=True, probe_share=0.5)
    services.until(lambda: fleet.live(), what="the worker")
    assert services.rows("SELECT count(*) AS n FROM probes")[0].n == 0
    ids = [probes.submit(services.engine, "cpu", kind) for kind in ProbeKind]
    mine = []

    def drawn() -> bool:
        """Return whether the fleet has submitted a probe itself, and submit more work if needed."""
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


def test_a_fleet_that_judges_wrongly_is_paused(services: Services, start_fleet: Callable[..., Fleet]) -> None:
    """A second known-duration kernel without a time, which the fleet submits itself, pauses it until a resume."""
    # Without a good probe, the verdicts of this host's earlier fleets are suspect too.
    earlier = {str(row.id) for row in services.rows("SELECT id FROM evaluations")}
    fleet = start_fleet(probe_share=0.5)
    doubted = services.submit("ok")
    assert services.verdict(doubted).passed
    first = probes.submit(services.engine, "cpu", ProbeKind.KNOWN_DURATION)
    [reason] = services.until(lambda: paused(fleet), 180, "the pause")
    rows = found(services, finding=Finding.CLOCK_UNEVEN)
    assert [(row.confirms, row.evaluation_id == first) for row in rows] == [(True, False), (False, True)]
    [record] = told(fleet, "status")
    [pause] = record["probes"]["pauses"]
    assert (pause["finding"], pause["device"], pause["reason"]) == ("clock_uneven", "cpu", reason)
    suspect = {row["evaluation_id"] for row in told(fleet, "probe", "doubted", str(pause["id"]))}
    assert suspect - earlier == {str(doubted)}
    waits = services.submit("ok")
    services.until(lambda: "worker pauses" in fleet.log.read_text(), what="the log")
    assert services.attempts(waits) == []
    assert told(fleet, "probe", "resume", pause["host"]) == [{"host": pause["host"], "resumed": 1}]
    assert services.verdict(waits).passed
    fleet.stop(signal.SIGTERM)
