"""`kqueue watch`: lines for changes, the end, the exit statuses of `kqueue wait`, and a verdict at each save."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from kqueue.categories import Category
from kqueue.contract import Outcome
from tests.cli.command import Cli, Judgement, judge, submit
from tests.samples import ended, passed
from tests.waiting import until

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


def test_each_save_is_judged(cli: Cli, engine: Engine, worker: UUID, judging: Judging) -> None:
    """A verdict in words follows each save, quick saves count once, refusals end nothing, and Ctrl-C ends with 0."""

    def saved(content: str) -> None:
        # Editors write a new file and rename it.
        cli.write("k.py.new", content).replace(cli.directory / "k.py")

    def kernels() -> list[str]:
        with engine.connect() as connection:
            return list(connection.scalars(text("SELECT source FROM kernels ORDER BY created_at")))

    cli.write("p.py", "class Model: ...\n")
    saved("class ModelNew: a = 1\n")
    judging(by_label)
    with cli.start("watch", "k.py", "--problem", "p.py", "--backend", "torch", "--fleet") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "CORRECT" in process.stdout.readline()
        for number in range(2, 6):
            saved(f"class ModelNew: a = {number}\n")
            time.sleep(0.02)
        until(lambda: len(kernels()) == 2, what="the second kernel")
        assert kernels()[-1] == "class ModelNew: a = 5\n"
        saved("")
        assert "empty" in process.stderr.readline()
        saved("class ModelNew: a = 6\n")
        until(lambda: len(kernels()) == 3, what="the third kernel")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert "stopped" in err
    assert out.count("CORRECT") >= 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["none.py", "--problem", "p.py"], "none.py: no such file"),
        (["mine.py", "--problem", "gone.py", "--fleet"], "gone.py: No such file or directory"),
        (["a.py", "b.py", "--problem", "p.py"], "give one kernel's file"),
        (["b", "--fleet"], "need --problem"),
    ],
)
def test_what_is_refused(cli: Cli, words: list[str], told: str) -> None:
    """Options of one meaning are refused with the other."""
    done = cli("watch", *words)
    assert (done.returncode, told in done.stderr) == (2, True), done.stderr
