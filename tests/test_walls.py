"""The walls of the house: who may import whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: Packages, and what nothing in them may import.
WALLS = {
    "kqueue": ["workers", "torch", "triton", "numpy", "examples", "tests"],
    "kqueue/store": ["kqueue.cli", "kqueue.client", "kqueue.local", "celery"],
    "workers/judge/candidate": [
        "kqueue.store",
        "kqueue.broker",
        "kqueue.config",
        "kqueue.client",
        "kqueue.local",
        "workers.judge.trial",
        "workers.judge.keeper",
        "workers.delivery",
        "workers.app",
        "workers.fleet",
        "sqlalchemy",
        "celery",
    ],
    "workers/judge/channel": [
        "kqueue",
        "workers.judge.trial",
        "workers.judge.keeper",
        "workers.judge.candidate",
        "workers.delivery",
    ],
    "workers/judge/sandbox": [
        "kqueue.store",
        "kqueue.broker",
        "kqueue.config",
        "workers.judge.trial",
        "workers.delivery",
    ],
    "migrations": ["workers", "kqueue.client", "kqueue.cli"],
}


def imports(path: Path) -> set[str]:
    """Every module that a file imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("package", WALLS)
def test_a_package_imports_nothing_from_beyond_its_wall(package: str) -> None:
    """Imports run one way: workers to kqueue; the untrusted side knows nothing of the trusted one."""
    files = list((ROOT / package).rglob("*.py"))
    assert files, f"{package} holds no files: the wall guards nothing"
    for path in files:
        for module in imports(path):
            broken = [wall for wall in WALLS[package] if module == wall or module.startswith(wall + ".")]
            assert not broken, f"{path.relative_to(ROOT)} imports {module}"


def test_the_wall_test_sees_an_import(tmp_path: Path) -> None:
    """The reading of imports finds all their forms."""
    file = tmp_path / "x.py"
    file.write_text("import a.b\nfrom c import d\ndef f():\n    from e.f import g\n")
    assert imports(file) == {"a.b", "c", "c.d", "e.f", "e.f.g"}


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
