"""`kqueue logs`: the history of one evaluation in order of time."""

from __future__ import annotations

import json
from uuid import UUID, uuid4

from sqlalchemy import Engine

from kqueue.categories import Category
from kqueue.contract import Phase
from kqueue.store import evaluations
from tests.cli.command import Cli, judge, submit
from tests.samples import ended, passed

HOSTILE = "\x1b[2J\u202eevil"


def test_rows_and_lines_in_order_of_time(cli: Cli, engine: Engine, worker: UUID) -> None:
    """The output has attempts with their last phase, the verdict, the kernel's log, and lines of the fleet's logs."""
    [identity] = submit(engine, HOSTILE)
    claim = evaluations.claim(engine, identity, worker_id=worker, lease_s=30)
    assert claim is not None
    lost = ended(Category.WORKER_LOST, phase=Phase.TIME)
    evaluations.finish(engine, identity, claim.number, lost, written_by="worker", retry_delay_s=0)
    judge(engine, worker, lambda _: passed(log=f"hello\n{HOSTILE}\n"))
    at = "2026-01-02T03:04:05Z"
    lines = [
        {"event": f"{HOSTILE} a clerk", "evaluation": str(identity), "timestamp": at},
        {"event": "no", "timestamp": at},
    ]
    cli.write("home/logs/workers.log", "".join(json.dumps(line) + "\n" for line in lines))
    cli.write("home/logs/workers.log.1", f"2026-01-02T03:04:04Z before {identity}\n")
    known = cli.told("logs", str(identity)[:8])
    assert [one["event"] for one in known] == [
        f"2026-01-02T03:04:04Z before {identity}", f"{HOSTILE} a clerk", "submitted", "attempt begins", "attempt ended",
        "attempt begins", "attempt ended", "verdict", "the kernel's log",
    ]  # fmt: skip
    assert known[0]["source"] == "workers.log.1"
    assert (known[4]["fields"]["phase"], known[4]["fields"]["written_by"]) == ("time", "worker")
    assert known[-1]["lines"] == ["hello", HOSTILE]
    for_people = cli("logs", str(identity)).stdout
    assert not set(for_people) & set("\x1b\u202e")
    assert "    hello\n" in for_people
    assert len(cli.told("logs", str(identity), "--limit", "2")) == 2


def test_lines_from_elsewhere(cli: Cli, engine: Engine, worker: UUID) -> None:
    """Lines come from `--file` or a pipe, also without the database or for an evaluation that it no longer has."""
    identity = uuid4()
    line = f"worker-1 | 2026-01-02T03:04:05Z [info] begun evaluation={identity}\n"
    cli.write("there.log", line)
    away = {"KQUEUE_DATABASE_URL": "postgresql+psycopg://nobody@127.0.0.1:1/x"}
    by_file = cli("logs", str(identity), "--file", "there.log", "--json", **away)
    assert "searching only log files" in by_file.stderr
    assert json.loads(by_file.stdout)["source"] == "there.log"
    by_pipe = cli("logs", str(identity), "--file", "-", "--json", stdin=line.encode())
    assert json.loads(by_pipe.stdout)["source"] == "stdin"
    assert cli("logs", str(uuid4()), "--file", "there.log").returncode == 5
    assert cli("logs", str(identity), "--file", "missing.log").returncode == 2
