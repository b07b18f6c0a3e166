"""A quick test cannot start a service, no test module imports another, and planted faults fit the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.planted.faults import FAULTS, Fault

TESTS = Path(__file__).parent
#: Import of a module of tests or a conftest.
OF_TESTS = re.compile(r"^(tests|\.+)(\..*)?\b(test_\w+|conftest)\b")

KINDS = """
import subprocess
import pytest
from tests.services import starts_services

@pytest.fixture
@starts_services
def database():
    subprocess.Popen(["/usr/bin/true", "bin/postgres"]).wait()

def test_with_a_database(database): pass
@pytest.mark.services
def test_a_server(): subprocess.run(["/usr/bin/true", "-m", "kqueue", "serve"])
def test_late(request): request.getfixturevalue("database")
def test_a_worker():
    try:
        subprocess.run(["/usr/bin/true", b"-m", b"celery"])
    except Exception:
        pass
def test_another_program(): subprocess.run(["/usr/bin/true", "postgres.md", "kqueue", "judge"])
"""


@pytest.mark.slow("runs pytest")
def test_a_quick_test_cannot_start_a_service(pytester: pytest.Pytester) -> None:
    """A quick test fails if it starts a service, through a fixture or not, even if it catches the error."""
    pytester.makepyfile(test_kinds=KINDS)
    pytester.makeconftest("pytest_plugins = ['tests.tiers']")
    pytester.syspathinsert(TESTS.parent)
    ran = pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider")
    ran.assert_outcomes(passed=3, failed=2)
    for name, what in (("late", "postgres"), ("a_worker", "celery")):
        ran.stdout.fnmatch_lines_random([f"*test_{name} is a quick test and starts {what}:*"])


def test_no_test_is_imported() -> None:
    """No file imports a module of tests or a conftest. Shared code is in separate modules and fixtures."""
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{'.' * node.level}{node.module or ''}.{name}" for name in names]
            assert not any(map(OF_TESTS.search, names)), path


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_fits_the_code(fault: Fault) -> None:
    """Its text is once in the code, and its tests exist."""
    assert (TESTS.parent / fault.path).read_text().count(fault.before) == 1
    assert all((TESTS.parent / test.partition("::")[0]).exists() for test in fault.tests)
