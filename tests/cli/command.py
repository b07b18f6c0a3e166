"""Run the command in the tests' process or in a subprocess, with a stand-in for the workers."""

from __future__ import annotations

import atexit
import functools
import gc
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import typer.main
from sqlalchemy import Engine, text

from kqueue.cli import main
from kqueue.contract import Outcome, Request
from kqueue.store import evaluations

PROBLEM = "class Model: ...\n"
KERNEL = "class ModelNew: ...\n"
COMMAND = (sys.executable, "-m", "kqueue")
Done = subprocess.CompletedProcess[str]
# Typer builds all commands for each call, which takes longer than most commands.
typer.main.get_command = functools.cache(typer.main.get_command)


@dataclass(frozen=True)
class Cli:
    """Runs `kqueue` in ``directory`` with the settings in ``environment``."""

    directory: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    patience_s: float = 120

    def __call__(self, *arguments: str, stdin: bytes = b"", **changed: str) -> Done:
        """Run a command in the tests' process to its end. ``changed`` overrides environment variables."""
        read, out, err = (io.TextIOWrapper(io.BytesIO(data), "utf-8", write_through=True) for data in (stdin, b"", b""))
        err.reconfigure(errors="backslashreplace")
        status: object = None
        modules, threshold = set(sys.modules), gc.get_threshold()
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.directory)
            for name, value in {**self.environment, **changed}.items():
                patch.setenv(name, value)
            patch.setattr(sys, "path", [str(self.directory), *sys.path])
            patch.setattr(sys, "argv", ["kqueue", *arguments])
            for name, stream in {"stdin": read, "stdout": out, "stderr": err}.items():
                patch.setattr(sys, name, stream)
            try:
                main()
            except SystemExit as end:
                status = end.code
            finally:
                gc.set_threshold(*threshold)
                atexit.unregister(gc.freeze)
                for number, handler in handlers.items():
                    signal.signal(number, handler)
                for name in set(sys.modules) - modules:  # another test has other modules of these names
                    if (getattr(sys.modules[name], "__file__", None) or "").startswith(f"{self.directory}/"):
                        del sys.modules[name]
        assert isinstance(status, int)
        return self._done(arguments, status, *(stream.buffer.getvalue() for stream in (out, err)))

    def told(self, *arguments: str, status: int = 0, **changed: str) -> list[Any]:
        """Run a command with `--json`, which must end with ``status``. Return its records."""
        done = self(*arguments, "--json", **changed)
        assert done.returncode == status, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def process(self, *arguments: str, stdin: bytes = b"", **changed: str) -> Done:
        """Run a command as a subprocess to its end. ``changed`` overrides environment variables."""
        done = subprocess.run(
            [*COMMAND, *arguments], cwd=self.directory, env={**os.environ, **self.environment, **changed}, input=stdin,
            capture_output=True, timeout=self.patience_s, check=False,
        )  # fmt: skip
        return self._done(arguments, done.returncode, done.stdout, done.stderr)

    @contextmanager
    def start(self, *arguments: str, **changed: str) -> Generator[subprocess.Popen[str]]:
        """Run a command as a subprocess with pipes during the block. Kill it if the block fails."""
        environment = {**os.environ, **self.environment, **changed}
        with subprocess.Popen(
            [*COMMAND, *arguments], cwd=self.directory, env=environment, text=True, errors="backslashreplace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            try:
                yield process
            except BaseException:
                process.kill()
                raise

    @staticmethod
    def _done(arguments: Sequence[str], status: int, out: bytes, err: bytes) -> Done:
        done = Done(arguments, status, out.decode(), err.decode(errors="backslashreplace"))
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path


def submit(
    engine: Engine,
    *labels: str,
    batch: str | None = None,
    problem: str = PROBLEM,
    problem_label: str = "relu",
    version: str = "",
) -> list[UUID]:
    """Submit a kernel for each label as a client does. The backend `t` is Triton. Return the ids."""
    requests = [
        Request(
            problem=problem, kernel=f"{KERNEL}# {label}{version}\n",
            backend="triton" if label == "t" else "torch", lane="cpu", problem_label=problem_label,
            kernel_label=label, batch=batch,
        )
        for label in labels
    ]  # fmt: skip
    return [done.evaluation_id for done in evaluations.submit(engine, requests)]


#: Returns an evaluation's outcome for its kernel's label.
Judgement = Callable[[str], Outcome]


def judge(engine: Engine, worker: UUID, judgement: Judgement, conditions: str | None = None) -> int:
    """Claim all queued evaluations and record the outcomes by ``judgement``. Return how many were judged.

    Like a worker, skip an evaluation that its producer cancels meanwhile.
    """
    with engine.connect() as connection:
        queued = connection.execute(text("SELECT id FROM evaluations WHERE state = 'queued'")).scalars().all()
    judged = 0
    for identity in queued:
        claim = evaluations.claim(engine, identity, worker_id=worker, lease_s=30)
        if claim is None:
            continue
        judged += 1
        facts = {"device": "test device", "torch": "2.13", "python": "3.11", "host": "host"}
        evaluations.set_environment(engine, claim.attempt_id, facts, conditions=conditions)
        outcome = judgement(claim.request.kernel_label or "")
        evaluations.finish(engine, identity, claim.number, outcome, written_by="judge", retry_delay_s=0)
    return judged
