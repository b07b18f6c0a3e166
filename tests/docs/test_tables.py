"""Tables that are to be complete: commands, targets of make, folders of tests, packages and modules."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from kqueue.cli import app

ROOT = Path(__file__).parents[2]


def test_generated_parts_are_up_to_date() -> None:
    """Pages and tables that are made from code are what the code says; else run `make docs`."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "docs.py", "--check"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_every_command_has_a_row() -> None:
    """The table names each command of `kqueue` and of its groups."""
    table = (ROOT / "docs" / "cli.md").read_text().partition("<!-- commands")[2].partition("<!-- end of commands")[0]
    rows = {tuple(words.split()[:2]) for words in re.findall(r"`kqueue ([a-z ]+)`", table)}
    commands = typer.main.get_command(app).commands
    shown = {name: command for name, command in commands.items() if not command.hidden}
    assert {row[0] for row in rows} == set(shown)
    for group in ("db", "gpu", "probe", "token"):
        assert {row[1] for row in rows if row[0] == group} == set(shown[group].commands)


def test_make_help_lists_every_target() -> None:
    """Each target of the Makefile says in `make help` what it does."""
    phony = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    shown = subprocess.run(["make", "-s", "-C", ROOT, "help"], capture_output=True, text=True, check=True).stdout
    rows = dict(re.findall(r"^make ([a-z-]+) +(\S.*)$", shown, re.MULTILINE))
    assert set(rows) == set(phony[1].split())


def test_every_folder_of_tests_has_a_row() -> None:
    """CONTRIBUTING.md says of each folder of tests what it holds to, and of none that is not there."""
    document = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"^\| .*", document, re.MULTILINE))
    rows = {path for row in named for path in re.findall(r"`tests/(\w+)`", row.split("|")[1])}
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert rows == folders


@pytest.mark.parametrize("package", ["kqueue", "workers", "workers/judge"])
def test_every_package_and_module_is_described(package: str) -> None:
    """docs/architecture.md says what belongs in each package and module of a folder, and names none twice."""
    table = (ROOT / "docs" / "architecture.md").read_text().partition("## Where the code is")[2].partition("\n## ")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`([\w/.]+)`", row)]
    there = {f"{path.parent.relative_to(ROOT)}/" for path in (ROOT / package).glob("*/__init__.py")}
    there |= {str(path.relative_to(ROOT)) for path in (ROOT / package).glob("[a-z]*.py")}
    assert there - set(named) == set()
    assert sorted(set(named)) == sorted(named)


def test_log_lines_of_the_alarms_exist() -> None:
    """Each line of a log that docs/operations.md explains is one that the code writes."""
    alarms = (ROOT / "docs" / "operations.md").read_text().partition("| line | means | do |\n")[2].partition("\n\n")[0]
    lines = [line for row in alarms.splitlines()[1:] for line in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert len(lines) > 10
    sources = [path.read_text() for name in ("kqueue", "workers") for path in (ROOT / name).rglob("*.py")]
    code = "\n".join(sources)
    assert [line for line in lines if line != "passed: false" and line not in code] == []
