"""What the fleet's processes really load. Who may import whom is in pyproject.toml, for import-linter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow("starts a Python for each part")

ROOT = Path(__file__).parents[1]
#: What a process prints: all modules that it has loaded.
_LOADED = "import json, sys; print(json.dumps(sorted(sys.modules)))"


def loaded(*steps: str) -> list[set[str]]:
    """Return the modules that one process has loaded after each of these steps."""
    code = "\n".join(f"{step}\n{_LOADED}" for step in steps)
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return [set(json.loads(line)) for line in out.splitlines()]


def test_a_candidate_s_process_never_loads_what_knows_credentials() -> None:
    """What the fork server really imports holds no database driver, no broker, no trace and no settings."""
    [modules] = loaded("import workers.judge.forkserver.server, workers.judge.candidate.harness")
    knows = {"sqlalchemy", "psycopg", "celery", "redis", "kombu", "opentelemetry"}
    assert not knows & modules
    assert not modules & {"kqueue.config", "kqueue.broker", "kqueue.store", "workers.judge.pipeline"}


@pytest.mark.parametrize(
    "steps",
    [
        {
            "import kqueue": {"celery", "httpx", "pydantic", "sqlalchemy", "torch"},
            "kqueue.Client": {"celery", "httpx", "numpy", "sqlalchemy", "torch", "triton"},
            "import kqueue.store.evaluations, kqueue.store.workers": {"celery", "kombu", "redis"},
            "kqueue.Client(database_url='postgresql://x/y')": {"httpx", "numpy", "torch", "triton"},
            # The supervisor judges nothing and sends no trace: memory, and seconds at each start.
            # redis loads OpenTelemetry's metrics by itself where they are installed.
            "import workers.fleet": {"torch", "triton", "numpy", "opentelemetry.exporter", "workers.traces"},
        },
        {
            "import kqueue; kqueue.RemoteClient": {
                "celery", "kombu", "opentelemetry", "psycopg", "rich", "sqlalchemy", "torch",
            },
            # The client keeps httpx's command line from being loaded with it, and from nothing else.
            "import httpx._main; assert httpx._main.main.name == 'main'": set(),
        },
    ],
    ids=["client", "remote"],
)  # fmt: skip
def test_each_part_loads_nothing_needless(steps: dict[str, set[str]]) -> None:
    """Each part of the package is loaded when it is first used, so a producer starts quickly."""
    for (step, needless), modules in zip(steps.items(), loaded(*steps), strict=True):
        assert not needless & modules, step
