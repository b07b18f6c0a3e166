"""`kqueue probe`, and probes in the output of `kqueue status` and `kqueue doctor`."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from sqlalchemy import Engine

from kqueue.features.probes import fleet as probes
from kqueue.states import ProbeKind
from kqueue.store import workers
from tests.cli.command import Cli, judge, submit
from tests.samples import passed


def test_a_pause_is_told_everywhere_and_ended(cli: Cli, worker: UUID, engine: Engine, services: Any) -> None:
    """A pause and its suspect verdicts are listed, and a requested probe is absent from the results."""
    [mine] = submit(engine, "mine")
    assert judge(engine, worker, lambda _: passed()) == 1
    [told] = cli.told("probe", "now", "--lane", "cpu", "--kind", "cheat")
    assert judge(engine, worker, lambda _: passed()) == 1
    probes.step(engine, share=0, live_s=60)
    [listed] = cli.told("probe", "list")
    assert (listed["finding"], listed["evaluation_id"]) == ("cheat_accepted", told["evaluation_id"])
    assert "cheat_accepted" in cli("probe", "list").stdout
    [pause] = cli.told("probe", "pauses")
    assert (pause["host"], pause["doubted"]) == ("here", 1)
    assert "a cheat passed" in cli("probe", "pauses").stdout
    assert cli("probe", "doubted", str(pause["id"])).stdout == f"{mine}\n"
    assert cli("probe", "doubted", str(pause["id"] + 1)).returncode == 2
    status = " ".join(cli("status").stdout.split())
    assert all(words in status for words in ("1 of 1 cheats accepted", f"kqueue probe doubted {pause['id']}"))
    assert (services("probes").state, "is paused" in services("probes").detail) == ("fail", True)
    assert told["evaluation_id"] not in cli("results", "--json").stdout
    assert "in service" in cli("probe", "resume", "here").stdout
    workers.pause(engine, {worker: None})  # as its supervisor does
    assert services("probes").state == "warn"
    assert probes.submit(engine, "cpu", ProbeKind.HONEST)
