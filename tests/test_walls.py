"""What the fleet's processes really load. Who may import whom is in pyproject.toml, for import-linter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow("starts a Python for each import")

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("module", ["workers.judge.keeper.forkserver", "workers.judge.candidate.harness"])
def test_a_candidate_s_process_never_loads_what_knows_credentials(module: str) -> None:
    """What the fork server really imports holds no database driver, no broker, no trace and no settings."""
    code = f"""
import sys, importlib
importlib.import_module({module!r})
knows = ('sqlalchemy', 'psycopg', 'celery', 'redis', 'kombu', 'opentelemetry')
bad = [m for m in sys.modules if m.split('.')[0] in knows
       or m in ('kqueue.config', 'kqueue.broker') or m.startswith(('kqueue.store', 'workers.judge.trial'))]
print(bad)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip().splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("code", "needless"),
    [
        ("import kqueue", {"celery", "httpx", "pydantic", "sqlalchemy", "torch"}),
        ("import kqueue; kqueue.Client", {"celery", "httpx", "numpy", "sqlalchemy", "torch", "triton"}),
        ("import kqueue; kqueue.Client(database_url='postgresql://x/y')", {"httpx", "numpy", "torch", "triton"}),
        (
            "import kqueue; kqueue.RemoteClient",
            {"celery", "kombu", "opentelemetry", "psycopg", "rich", "sqlalchemy", "torch"},
        ),
        ("import kqueue.store.evaluations, kqueue.store.workers", {"celery", "kombu", "redis"}),
    ],
)
def test_what_is_imported_loads_nothing_needless(code: str, needless: set[str]) -> None:
    """Each part of the package is loaded when it is first used, so a producer starts quickly."""
    code += "; import json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert needless & set(json.loads(done.stdout)) == set()


def test_httpx_s_command_line_is_itself_again() -> None:
    """The client keeps it from being loaded with httpx, and from nothing else."""
    code = "import kqueue; kqueue.RemoteClient; import httpx._main; print(httpx._main.main.name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "main"


def test_the_supervisor_is_light() -> None:
    """It judges nothing and sends no trace: memory, and seconds at each start."""
    # redis loads OpenTelemetry's metrics by itself where they are installed.
    needless = ("torch", "triton", "numpy", "opentelemetry.exporter", "workers.traces")
    code = f"import sys, workers.fleet; print([m for m in {needless} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
