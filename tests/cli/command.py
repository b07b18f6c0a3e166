"""The command as a process, and a stand-in for the workers behind it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

from sqlalchemy import Engine, text

from kqueue.contract import Outcome
from kqueue.store import evaluations

PROBLEM = "class Model: ...\n"
KERNEL = "class ModelNew: ...\n"


@dataclass(frozen=True)
class Cli:
    """Runs `kqueue` in ``directory`` with the settings in ``environment``."""

    directory: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    patience_s: float = 120

    def __call__(self, *arguments: str, stdin: bytes | None = None, **changed: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end. ``changed`` overrides the environment."""
        environment = {**os.environ, **self.environment, **changed}
        done = subprocess.run(
            [sys.executable, "-m", "kqueue", *arguments],
            cwd=self.directory,
            env=environment,
            input=stdin or b"",
            capture_output=True,
            timeout=self.patience_s,
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


#: Returns an evaluation's outcome, given its kernel's label.
Judgement = Callable[[str], Outcome]


def judge(engine: Engine, worker: UUID, judgement: Judgement) -> int:
    """Claim all queued evaluations and record the outcomes by ``judgement``. Return how many were judged.

    One that its producer cancels meanwhile is passed over, as a worker does.
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
        evaluations.set_environment(engine, claim.attempt_id, facts, conditions=None)
        outcome = judgement(claim.request.kernel_label or "")
        evaluations.finish(engine, identity, claim.number, outcome, written_by="judge", retry_delay_s=0)
    return judged
