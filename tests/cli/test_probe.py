"""`kqueue probe`, and what `kqueue status` and `kqueue doctor` tell of probes."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

from sqlalchemy import Engine

from kqueue.contract import Outcome
from kqueue.states import ProbeKind
from kqueue.store import evaluations, probes, workers
from tests.cli.command import Cli
from tests.samples import passed


def judged(engine: Engine, worker: UUID, identity: UUID, outcome: Outcome) -> None:
    """Have an evaluation come to this."""
    claimed = evaluations.claim(engine, identity, worker_id=worker, lease_s=30)
    assert claimed is not None
    evaluations.finish(engine, identity, claimed.number, outcome, written_by="judge", retry_delay_s=0)


def test_a_fleet_without_probes_says_so(cli: Cli, worker: UUID, services: Any) -> None:
    """In few words."""
    assert "no probe was judged" in cli("probe", "list").stdout
    assert "nothing was paused" in cli("probe", "pauses").stdout
    assert "were not paused by probes" in cli("probe", "resume", "here").stdout
    assert cli("probe", "doubted", "1").stdout == ""
    assert services("probes").state == "info"
    assert "the judge:" not in cli("status").stdout


def test_a_pause_is_told_everywhere_and_ended(cli: Cli, worker: UUID, engine: Engine, services: Any) -> None:
    """With the verdicts in doubt, which are listed; a probe is asked for at once, and nothing else shows it."""
    mine = json.loads(cli("submit", "-p", "relu.py", "-b", "torch", "--json", "mine.py").stdout)
    judged(engine, worker, UUID(mine["id"]), passed())
    told = json.loads(cli("probe", "now", "--lane", "cpu", "--kind", "cheat", "--json").stdout)
    judged(engine, worker, UUID(told["evaluation_id"]), passed())
    probes.step(engine, share=0, live_s=60)
    [listed] = [json.loads(line) for line in cli("probe", "list", "--json").stdout.splitlines()]
    assert (listed["finding"], listed["evaluation_id"]) == ("cheat_accepted", told["evaluation_id"])
    assert "cheat_accepted" in cli("probe", "list").stdout
    [pause] = [json.loads(line) for line in cli("probe", "pauses", "--json").stdout.splitlines()]
    assert (pause["host"], pause["doubted"]) == ("here", 1)
    assert "a cheat passed" in cli("probe", "pauses").stdout
    assert cli("probe", "doubted", str(pause["id"])).stdout == f"{mine['id']}\n"
    status = cli("status").stdout
    assert "1 of 1 cheats accepted" in " ".join(status.split())
    assert f"kqueue probe doubted {pause['id']}" in " ".join(status.split())
    assert (services("probes").state, "is paused" in services("probes").detail) == ("fail", True)
    assert told["evaluation_id"] not in cli("results", "--json").stdout
    assert "go on" in cli("probe", "resume", "here").stdout
    workers.pause(engine, {worker: None})  # as its supervisor does
    assert services("probes").state == "warn"
    assert probes.submit(engine, "cpu", ProbeKind.HONEST)


def test_what_is_no_kind_or_lane_is_refused(cli: Cli) -> None:
    """With the words that there are."""
    done = cli("probe", "now", "--lane", "cpu", "--kind", "canary")
    assert (done.returncode, "honest, cheat, spin" in done.stderr) == (2, True)
    assert cli("probe", "now", "--lane", "nowhere").returncode == 2
