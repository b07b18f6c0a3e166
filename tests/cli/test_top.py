"""`kqueue top`: one view for pipes, a live view on a terminal."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import termios
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine

from kqueue.categories import Category
from kqueue.contract import Outcome
from kqueue.store import evaluations, workers
from tests.cli.command import COMMAND, Cli, judge, submit
from tests.samples import ended, passed
from tests.store.steps import change

HOSTILE = "\x1b[2J\x1b]0;pwned\x07[bold red]mine[/]\u202e"


def by_label(label: str) -> Outcome:
    return ended(Category.WRONG_VALUES, message=HOSTILE) if "mine" in label else passed()


@pytest.fixture
def busy(engine: Engine, worker: UUID) -> UUID:
    """Record a passed evaluation, a failed one with hostile text, one on a hostile device name, and two queued ones."""
    submit(engine, "good", HOSTILE)
    judge(engine, worker, by_label)
    other = uuid4()
    workers.register(engine, id=other, name="gpu0-1@host", host="host", pid=2, lanes=["cpu"], device=HOSTILE)
    change(engine, "UPDATE workers SET heartbeat_at = now() + interval '1 hour'")
    running, *_ = submit(engine, "r", "q1", "q2")
    assert evaluations.claim(engine, running, worker_id=other, lease_s=3000) is not None
    workers.note_steps(engine, {(running, 1): "alone_measure"})
    return running


def test_once_prints_one_view(cli: Cli, busy: UUID) -> None:
    """The view has lanes with depth and age, workers, outcomes and the last failures, and escapes hostile text."""
    done = cli("top", "--once")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert ["cpu", "2", "1", "2"] in [line.split()[:4] for line in lines]
    for of, words in (
        ("1 of 2 slots busy", [" ended in a minute | 2 in an hour, 1 passed"]),
        ("gpu0-1@host", [str(busy)[:8], "alone measure"]),
        ("cpu-0@here", ["idle"]),
        ("wrong_values", ["candidate", "[bold red]mine[/]"]),
    ):
        [line] = [line for line in lines if of in line]
        assert all(word in line for word in words), line
    assert not set(done.stdout) & set("\x1b\x07\u202e")
    assert "1 of 2 slots busy" in cli("top").stdout, "without a terminal it is the same"


class Terminal:
    """`kqueue top` on a separate terminal."""

    def __init__(self, cli: Cli, columns: int, **changed: str) -> None:
        self.ours, self.its = pty.openpty()
        termios.tcsetwinsize(self.its, (40, columns))
        self.before = termios.tcgetattr(self.its)
        environment = {**os.environ, **cli.environment, "TERM": "xterm-256color", **changed}
        environment.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            [*COMMAND, "top", "--every", "0.5"], cwd=cli.directory, env=environment, stdin=self.its, stdout=self.its,
            stderr=self.its, start_new_session=True,
        )  # fmt: skip
        self.shown = b""

    def see(self, wanted: bytes, timeout_s: float = 90) -> None:
        self._read(lambda: wanted in self.shown, timeout_s, wanted)

    def ended(self, timeout_s: float = 90) -> int:
        self._read(lambda: self.process.poll() is not None, timeout_s, b"the end")
        while wait([self.ours], 0):
            self.shown += os.read(self.ours, 65536)
        return self.process.returncode

    def _read(self, enough: Callable[[], bool], timeout_s: float, what: bytes) -> None:
        deadline = time.monotonic() + timeout_s
        while not enough():
            assert time.monotonic() < deadline, (what, self.shown[-2000:])
            if wait([self.ours], 0.1):
                self.shown += os.read(self.ours, 65536)


@contextmanager
def terminal(cli: Cli, columns: int = 120, **changed: Any) -> Generator[Terminal]:
    """Run the command on a terminal, and end it after the block."""
    opened = Terminal(cli, columns, **changed)
    try:
        yield opened
    finally:
        opened.process.kill()
        opened.process.wait()
        os.close(opened.its)
        os.close(opened.ours)


def test_it_follows_the_fleet_and_gives_the_terminal_back(cli: Cli, engine: Engine, worker: UUID) -> None:
    """New results appear without a key press, also on a narrow terminal, and hostile text is escaped."""
    with terminal(cli, columns=40) as opened:
        opened.see(b"cpu-0@here")
        [identity] = submit(engine, HOSTILE)
        assert evaluations.claim(engine, identity, worker_id=worker, lease_s=3000) is not None
        opened.see(b"1 of 1 slots busy")
        opened.process.send_signal(signal.SIGINT)
        assert opened.ended() == 0
        assert b"\x1b[?1049h" in opened.shown
        assert opened.shown.rindex(b"\x1b[?1049l") > opened.shown.rindex(b"\x1b[?1049h")
        assert opened.shown.rindex(b"\x1b[?25h") > opened.shown.rindex(b"\x1b[?25l")
        assert termios.tcgetattr(opened.its) == opened.before
        assert not [words for words in (b"Traceback", b"\x1b]0;") if words in opened.shown]


def test_it_goes_on_without_postgres(cli: Cli, tmp_path: Any) -> None:
    """The terminal reports that Postgres is away, and q still quits."""
    with terminal(cli, KQUEUE_DATABASE_URL=f"postgresql+psycopg://x@/x?host={tmp_path}") as opened:
        opened.see(b"trying again")
        os.write(opened.ours, b"q")
        assert opened.ended() == 0
