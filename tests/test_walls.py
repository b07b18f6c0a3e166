"""What the fleet's processes really load. Who may import whom is in pyproject.toml, for import-linter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("module", ["workers.judge.keeper.forkserver", "workers.judge.candidate.harness"])
def test_a_candidate_s_process_never_loads_what_knows_credentials(module: str) -> None:
    """What the fork server really imports holds no database driver, no broker and no settings."""
    code = f"""
import sys, importlib
importlib.import_module({module!r})
bad = [m for m in sys.modules if m.split('.')[0] in ('sqlalchemy', 'psycopg', 'celery', 'redis', 'kombu')
       or m in ('kqueue.config', 'kqueue.broker') or m.startswith(('kqueue.store', 'workers.judge.trial'))]
print(bad)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip().splitlines()[-1] == "[]"


def test_the_base_package_imports_without_torch_and_quickly() -> None:
    """`import kqueue` and the client bring in neither torch nor Triton."""
    code = "import sys, kqueue; kqueue.Client; print([m for m in ('torch', 'triton', 'numpy') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "[]"


def test_the_supervisor_is_light() -> None:
    """It judges nothing, so it loads neither torch nor Triton: memory, and seconds at each start."""
    code = "import sys, workers.fleet; print([m for m in ('torch', 'triton', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
