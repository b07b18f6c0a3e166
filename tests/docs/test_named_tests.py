"""Each row of a table with the last column `test` names existing tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
#: Such a table with its header and the line below it.
TABLE = re.compile(r"^\|.*\| test \|\n\|[-|]+\n((?:\|.*\n)+)", re.MULTILINE)
ROWS = [
    (document.stem, row)
    for document in sorted((ROOT / "docs").glob("*.md"))
    for table in TABLE.findall(document.read_text())
    for row in table.splitlines()
]


def deaths() -> set[str]:
    """Return the cases of the test of deaths, read from its source."""
    for node in ast.parse((TESTS / "fleet" / "test_deaths.py").read_text()).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["DEATHS"]:
            return {case[0] for case in ast.literal_eval(node.value)}
    raise AssertionError("tests/fleet/test_deaths.py has no DEATHS")


@pytest.fixture(scope="module")
def tests() -> set[str]:
    """Return the names of all tests."""
    files = TESTS.rglob("test_*.py")
    return {name for file in files for name in re.findall(r"^ *def (test_\w+)\(", file.read_text(), re.MULTILINE)}


@pytest.mark.parametrize(("page", "row"), ROWS, ids=[f"{page}: {row.split('|')[1].strip()}" for page, row in ROWS])
def test_a_row_names_its_tests(page: str, row: str, tests: set[str]) -> None:
    """A row's test exists, or is in brackets a case of the test of deaths."""
    named = re.findall(r"`([^`]+)`", row.split("|")[-2])
    assert named, "no test is named"
    assert {name for name in named if not name.startswith("[")} <= tests
    assert {name[1:-1] for name in named if name.startswith("[")} <= deaths()


def test_every_death_is_in_a_row() -> None:
    """Each case of the test of deaths is documented."""
    assert deaths() <= {name for _, row in ROWS for name in re.findall(r"`\[([^`]+)\]`", row)}
