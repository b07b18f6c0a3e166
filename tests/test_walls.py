"""Modules that the fleet's processes load at run time. pyproject.toml has import-linter's rules."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow("starts a Python for each part")

ROOT = Path(__file__).parents[1]
#: Program that prints all modules that its process has loaded.
_LOADED = "import json, sys; print(json.dumps(sorted(sys.modules)))"


def loaded(*steps: str) -> list[set[str]]:
    """Return the modules that one process has loaded after each of these steps."""
    code = "\n".join(f"{step}\n{_LOADED}" for step in steps)
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return [set(json.loads(line)) for line in out.splitlines()]


def test_a_candidate_s_process_never_loads_what_knows_credentials() -> None:
    """The fork server imports no database driver, broker, trace or settings."""
    [modules] = loaded("import workers.judge.forkserver.server, workers.judge.candidate.harness")
    assert not {"sqlalchemy", "psycopg", "celery", "redis", "kombu", "opentelemetry"} & modules
    assert not modules & {"kqueue.config", "kqueue.broker", "kqueue.store", "workers.judge.pipeline"}


@pytest.mark.parametrize(
    "steps",
    [
        {
            "import kqueue": {"celery", "httpx", "pydantic", "sqlalchemy", "torch"},
            "kqueue.Client": {"celery", "httpx", "numpy", "sqlalchemy", "torch", "triton"},
            "import kqueue.store.evaluations, kqueue.store.workers": {"celery", "kombu", "redis"},
            "kqueue.Client(database_url='postgresql://x/y')": {"httpx", "numpy", "torch", "triton"},
            # The supervisor judges nothing and sends no trace, which saves memory and seconds at each start. redis
            # loads OpenTelemetry's metrics by itself where they are installed.
            "import workers.fleet": {"torch", "triton", "numpy", "opentelemetry.exporter", "workers.traces"},
        },
        {
            "import kqueue; kqueue.RemoteClient": {
                "celery", "httpx", "kombu", "opentelemetry", "psycopg", "rich", "sqlalchemy", "torch",
            },
            "import kqueue.mcp.connection": {"celery", "sqlalchemy", "torch"},
        },
    ],
    ids=["client", "remote"],
)  # fmt: skip
def test_each_part_loads_nothing_needless(steps: dict[str, set[str]]) -> None:
    """Each part of the package is loaded at its first use, so that a producer starts quickly."""
    for (step, needless), modules in zip(steps.items(), loaded(*steps), strict=True):
        assert not needless & modules, step
