"""Who records what, as documented: each row names tests, and they exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.fleet.test_deaths import DEATHS

ROOT = Path(__file__).parents[2]
TOLD = (ROOT / "docs" / "architecture.md").read_text().partition("### Who records what")[2].partition("\n###")[0]
ROWS = [line for line in TOLD.splitlines() if line.startswith("| ") and not line.endswith("| test |")]


@pytest.fixture(scope="module")
def tests() -> set[str]:
    """The names of all tests."""
    files = (ROOT / "tests").rglob("test_*.py")
    return {name for file in files for name in re.findall(r"^ *def (test_\w+)\(", file.read_text(), re.MULTILINE)}


@pytest.mark.parametrize("row", ROWS, ids=[row.split("|")[1].strip() for row in ROWS])
def test_a_row_names_its_tests(row: str, tests: set[str]) -> None:
    """A test's name, or in brackets a case of the test of deaths."""
    *_, column, _ = row.split("|")
    named = re.findall(r"`([^`]+)`", column)
    assert named, "no test is named"
    assert {name for name in named if not name.startswith("[")} <= tests
    assert {name[1:-1] for name in named if name.startswith("[")} <= {death[0] for death in DEATHS}


def test_every_death_is_in_a_row() -> None:
    """What is tested is documented."""
    assert {death[0] for death in DEATHS} <= set(re.findall(r"`\[([^`]+)\]`", TOLD))
