"""`kqueue watch`: lines for changes, the end, and the exit statuses of `kqueue wait`."""

from __future__ import annotations

import json
from collections.abc import Callable
from uuid import UUID

from sqlalchemy import Engine

from kqueue.categories import Category
from kqueue.contract import Outcome
from tests.cli.command import Cli, Judgement, judge, submit
from tests.samples import ended, passed

Judging = Callable[[Judgement], None]


def by_label(label: str) -> Outcome:
    return ended(Category.WRONG_VALUES) if label.startswith("bad") else passed()


def test_it_ends_when_all_have(cli: Cli, engine: Engine, worker: UUID, judging: Judging) -> None:
    """A batch and an evaluation are watched together, the last line has the counts, and a wrong kernel exits with 1."""
    submit(engine, "a", "bad", batch="b")
    [single] = submit(engine, "c")
    judging(by_label)
    done = cli("watch", "b", str(single)[:8])
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[-1] == "3 of 3 have ended: 2 passed, 1 wrong_values"
    assert cli("watch", str(single)).returncode == 0
    record = json.loads(cli("watch", "b", "--json").stdout)
    assert (record["total"], record["done"], record["categories"]) == (2, 2, {"passed": 1, "wrong_values": 1})


def test_what_has_not_ended_is_said(cli: Cli, engine: Engine, worker: UUID) -> None:
    """After the timeout the output has the queued evaluations with their estimated start, and the status is 4."""
    submit(engine, "before")
    judge(engine, worker, by_label)
    submit(engine, *"abc", batch="b")
    done = cli("watch", "b", "--timeout", "0")
    assert done.returncode == 4
    assert done.stdout.startswith("0 of 3 have ended: 3 queued, the last begins in about ")
    assert ", plus or minus " in done.stdout
    assert "kqueue: 3 of 3 without a verdict after 0 s" in done.stderr
    record = json.loads(cli("watch", "b", "--timeout", "0", "--json").stdout)
    assert min(record["last_starts_in_s"], record["last_starts_error_s"]) >= 0
