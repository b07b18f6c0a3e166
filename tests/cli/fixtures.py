"""The real command, with the run's Postgres and Valkey."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from uuid import UUID

import pytest
from sqlalchemy import Engine

from kqueue import charts, doctor
from kqueue.config import Config
from tests.cli.command import KERNEL, PROBLEM, Cli, Judgement, judge
from tests.waiting import repeated


@pytest.fixture
def cli(config: Config, tmp_path: Path) -> Cli:
    """Return the command with a fleet's services, and with a problem and a kernel to submit."""
    ready = Cli(tmp_path, config.environment())
    ready.write("relu.py", PROBLEM)
    ready.write("mine.py", KERNEL)
    return ready


@pytest.fixture
def services(config: Config) -> Callable[[str], doctor.Check]:
    """Return a function that makes the doctor's check of one service, but not the slow checks of this host."""
    return lambda name: next(check for check in doctor._services(config, deep=False) if check.name == name)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a picture's form in place of the picture, which takes half a second to draw."""
    monkeypatch.setattr(charts, "render", lambda _, form: str(form).encode())


@pytest.fixture
def worker(worker_id: UUID) -> UUID:
    """Register a live worker of the lane `cpu` in the database."""
    return worker_id


@pytest.fixture
def judging(engine: Engine, worker: UUID) -> Iterator[Callable[[Judgement], None]]:
    """Judge in the background until the test ends."""
    with ExitStack() as stack:
        yield lambda judgement: stack.enter_context(repeated(lambda: judge(engine, worker, judgement), 0.05))
