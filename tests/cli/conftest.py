"""The real command, in a separate process, with the run's Postgres and Valkey."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, text

from kqueue.categories import Category
from kqueue.config import Config
from kqueue.contract import Outcome
from kqueue.evidence import Measurement
from kqueue.store import evaluations, workers

PROBLEM = "class Model: ...\n"
KERNEL = "class ModelNew: ...\n"


@dataclass(frozen=True)
class Cli:
    """Runs `kqueue` in ``directory`` with the settings in ``environment``."""

    directory: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, *arguments: str, stdin: bytes | None = None, **changed: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end. ``changed`` overrides the environment."""
        environment = {**os.environ, **self.environment, **changed}
        done = subprocess.run(
            [sys.executable, "-m", "kqueue", *arguments],
            cwd=self.directory,
            env=environment,
            input=stdin or b"",
            capture_output=True,
            timeout=120,
            check=False,
        )
        decoded = subprocess.CompletedProcess(
            done.args, done.returncode, done.stdout.decode(), done.stderr.decode(errors="backslashreplace")
        )
        assert "Traceback" not in decoded.stderr, decoded.stderr
        return decoded

    def write(self, name: str, content: str | bytes) -> Path:
        """Put a file into the directory."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path


@pytest.fixture
def cli(config: Config, tmp_path: Path) -> Cli:
    """The command with a fleet's services, and a problem and a kernel to submit."""
    ready = Cli(tmp_path, config.environment())
    ready.write("relu.py", PROBLEM)
    ready.write("mine.py", KERNEL)
    return ready


@pytest.fixture
def worker(engine: Engine) -> UUID:
    """A live worker of the lane `cpu`, as the database knows it."""
    identity = uuid4()
    workers.register(engine, id=identity, name="cpu-0@host", host="host", pid=1, lanes=["cpu"], device="cpu")
    return identity


def measurement(median_ms: float) -> Measurement:
    """Return a measurement as a judge would take it."""
    return Measurement(
        basis="cpu_clock",
        count=100,
        median_ms=median_ms,
        q1_ms=median_ms * 0.9,
        q3_ms=median_ms * 1.1,
        mean_ms=median_ms,
        std_ms=0.01,
        min_ms=median_ms * 0.8,
        max_ms=median_ms * 2,
        null_ms=0.002,
        cold_l2=True,
    )


def passed() -> Outcome:
    """Return the outcome of a correct kernel, twice as fast as the reference."""
    return Outcome(category=Category.PASSED, runtime=measurement(0.5), baseline=measurement(1.0))


#: Returns an evaluation's outcome, given its kernel's label.
Judgement = Callable[[str], Outcome]


def judge(engine: Engine, worker: UUID, judgement: Judgement) -> int:
    """Claim all queued evaluations and record the outcomes by ``judgement``. Return their number."""
    with engine.connect() as connection:
        queued = connection.execute(text("SELECT id FROM evaluations WHERE state = 'queued'")).scalars().all()
    for identity in queued:
        claim = evaluations.claim(engine, identity, worker_id=worker, lease_s=30)
        assert claim is not None
        facts = {"device": "test device", "torch": "2.13", "python": "3.11", "host": "host"}
        evaluations.set_environment(engine, claim.attempt_id, facts)
        outcome = judgement(claim.request.kernel_label or "")
        evaluations.finish(engine, identity, claim.number, outcome, written_by="judge", retry_delay_s=0)
    return len(queued)


@pytest.fixture
def judging(engine: Engine, worker: UUID) -> Iterator[Callable[[Judgement], None]]:
    """Start judging in the background until the test ends."""
    over = threading.Event()
    threads: list[threading.Thread] = []

    def start(judgement: Judgement) -> None:
        def loop() -> None:
            while not over.wait(0.05):
                judge(engine, worker, judgement)

        threads.append(threading.Thread(target=loop))
        threads[-1].start()

    yield start
    over.set()
    for thread in threads:
        thread.join()
