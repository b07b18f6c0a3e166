"""`kqueue watch`: lines for changes, the end, and exit statuses as `kqueue wait` has them."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from uuid import UUID

from sqlalchemy import Engine

from kqueue.categories import Category
from kqueue.contract import Outcome, Request
from kqueue.store import evaluations
from tests.cli.command import Cli, Judgement, judge
from tests.samples import ended, passed

Judging = Callable[[Judgement], None]


def submit(engine: Engine, *labels: str, batch: str | None = None) -> list[UUID]:
    requests = [
        Request(
            problem="class Model: ...\n", kernel=f"class ModelNew: ...  # {label}\n", backend="torch", lane="cpu",
            kernel_label=label, batch=batch,
        )
        for label in labels
    ]  # fmt: skip
    return [done.evaluation_id for done in evaluations.submit(engine, requests)]


def by_label(label: str) -> Outcome:
    return ended(Category.WRONG_VALUES) if label.startswith("bad") else passed()


def test_it_ends_when_all_have(cli: Cli, engine: Engine, worker: UUID, judging: Judging) -> None:
    """A batch and an evaluation together; the last line has the counts; a wrong kernel makes the status 1."""
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
    """What is queued, and when the last one begins, as far as that is known; the status is 4 after the time."""
    submit(engine, "before")
    judge(engine, worker, by_label)
    submit(engine, *"abc", batch="b")
    done = cli("watch", "b", "--timeout", "0")
    assert done.returncode == 4
    assert done.stdout.startswith("0 of 3 have ended: 3 queued; the last begins in about ")
    assert ", give or take " in done.stdout
    assert "kqueue: 3 of 3 without a verdict after 0 s" in done.stderr
    record = json.loads(cli("watch", "b", "--timeout", "0", "--json").stdout)
    assert min(record["last_starts_in_s"], record["last_starts_error_s"]) >= 0


def test_without_a_worker_the_reason_is_said(cli: Cli, engine: Engine) -> None:
    """There is no estimate without a worker. An unknown name is refused."""
    submit(engine, "a", batch="\x1b[2J[bold]b")
    done = cli("watch", "\x1b[2J[bold]b", "--timeout", "0")
    assert done.stdout == "0 of 1 have ended: 1 queued; no live worker serves the lane cpu\n"
    assert "\x1b" not in done.stderr
    done = cli("watch", "nobody")
    assert (done.returncode, "nobody is no batch or evaluation" in done.stderr) == (2, True)


def test_a_terminal_shows_a_bar(cli: Cli, engine: Engine, worker: UUID, judging: Judging) -> None:
    """The bar goes to the terminal, and the outcome to stdout."""
    submit(engine, "a", "b", batch="b")
    ours, its = pty.openpty()
    command = [sys.executable, "-m", "kqueue", "watch", "b"]
    environment = {**os.environ, **cli.environment, "TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen(command, cwd=cli.directory, env=environment, stdout=subprocess.PIPE, stderr=its) as process:
        os.close(its)
        shown = b""
        judged = False
        try:
            while found := os.read(ours, 4096):
                shown += found
                if not judged and b"0/2" in shown:
                    judging(by_label)
                    judged = True
        except OSError:
            pass  # the terminal is closed at its other end
        assert process.stdout is not None
        told = process.stdout.read().decode()
    os.close(ours)
    assert process.returncode == 0
    assert told == "2 of 2 have ended: 2 passed\n"
    assert "━".encode() in shown
