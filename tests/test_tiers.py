"""The tiers of tests (tests/tiers.py), and that no test needs another's module."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
#: The name of a module of tests or a conftest.
OF_TESTS = re.compile(r"^(tests|\.+)(\..*)?\b(test_\w+|conftest)\b")

#: Tests of each kind, with the markers of tests/tiers.py. `late` asks for its fixture while it runs.
KINDS = """
import subprocess
import pytest
from tests.services import starts_services

@pytest.fixture
@starts_services
def database():
    subprocess.Popen(["/usr/bin/true", "bin/postgres"]).wait()

@pytest.fixture
def table(database):
    return None

def test_by_itself(): pass
def test_with_a_table(table): pass
@pytest.mark.slow("it compiles")
def test_slow(): pass
@pytest.mark.services
def test_a_server(): subprocess.run(["/usr/bin/true", "-m", "kqueue", "serve"])
def test_late(request): request.getfixturevalue("table")
def test_a_fleet(): subprocess.run(["/usr/bin/true", "-m", "kqueue", "up"])
def test_a_worker():
    try:
        subprocess.run(["/usr/bin/true", b"-m", b"celery"])
    except Exception:
        pass
def test_another_program(): subprocess.run(["/usr/bin/true", "postgres.md", "kqueue", "judge"])
"""
MARKERS = "\n".join(f"  {name}: a marker" for name in ("quick", "services", "slow", "gpu", "chaos", "compose"))


def imported(path: Path) -> list[str]:
    """The names that a module imports; a leading dot is a relative import."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names += [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return names


@pytest.fixture
def kinds(pytester: pytest.Pytester) -> pytest.Pytester:
    """A folder with :data:`KINDS`, in which the tiers hold."""
    pytester.makepyfile(test_kinds=KINDS)
    pytester.makeini(f"[pytest]\nmarkers =\n{MARKERS}\naddopts = --strict-markers -p no:cacheprovider")
    pytester.makeconftest("pytest_plugins = ['tests.tiers']")
    pytester.syspathinsert(ROOT)
    return pytester


@pytest.mark.slow("runs pytest")
def test_a_fixture_that_starts_services_puts_a_test_out_of_the_quick_tier(kinds: pytest.Pytester) -> None:
    """Also through another fixture; a marker for services and one for slow tests do too."""
    listed = kinds.runpytest_subprocess("--collect-only", "-q", "-m", "not quick").outlines
    found = {line.partition("::")[2] for line in listed if "::" in line}
    assert found == {"test_with_a_table", "test_slow", "test_a_server"}


@pytest.mark.slow("runs pytest")
def test_a_quick_test_cannot_start_a_service(kinds: pytest.Pytester) -> None:
    """In every tier it fails if it starts one, whether through a fixture or not, and whatever it catches."""
    ran = kinds.runpytest_subprocess("-q")
    ran.assert_outcomes(passed=5, failed=3)
    for name, what in (("late", "postgres"), ("a_fleet", "up"), ("a_worker", "celery")):
        ran.stdout.fnmatch_lines_random([f"*test_{name} is a quick test and starts {what}:*"])


@pytest.mark.slow("runs pytest")
def test_a_slow_test_says_why(pytester: pytest.Pytester) -> None:
    """A marker without a reason is refused before anything runs."""
    pytester.makepyfile("import pytest\n@pytest.mark.slow\ndef test_it(): pass")
    pytester.makeconftest("pytest_plugins = ['tests.tiers']")
    pytester.syspathinsert(ROOT)
    ran = pytester.runpytest_subprocess()
    assert ran.ret == pytest.ExitCode.USAGE_ERROR
    ran.stderr.fnmatch_lines(["*test_it: give a reason*"])


def test_no_test_is_imported() -> None:
    """Nothing imports a module of tests or a conftest: what several need is in modules and fixtures of its own."""
    assert [(str(path), name) for path in TESTS.rglob("*.py") for name in imported(path) if OF_TESTS.search(name)] == []


def test_every_test_is_in_a_target_of_make() -> None:
    """`make test` leaves out chaos, compose and benchmarks alone, and each of them has a target."""
    makefile = (ROOT / "Makefile").read_text()
    assert "-m 'not compose and not chaos and not benchmark'" in makefile
    assert "-m chaos" in makefile
    assert "-m compose" in makefile
    assert "-m benchmark" in makefile
    assert "-m quick" in makefile
