"""Behaviour that all commands share, and the table of categories."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from kqueue import categories, errors, evidence
from kqueue.cli import STATUSES, exit_status
from kqueue.text import clean, one_line
from tests.cli.command import COMMAND, Cli

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("command", ["categories", "evidence"])
def test_a_generated_document_is_what_the_command_prints(command: str) -> None:
    """The document begins with the Markdown output, and the plain output lists each category and fact."""
    assert (ROOT / "docs" / f"{command}.md").read_text().startswith(Cli(ROOT)(command, "--markdown").stdout)
    facts = evidence.Facts.model_fields.keys() | evidence.Evidence.model_fields.keys()
    words = {word for line in Cli(ROOT)(command).stdout.splitlines() for word in line.split()[:3]}
    assert words >= (set(map(str, categories.Category)) if command == "categories" else facts)


def test_help_loads_nothing_heavy() -> None:
    """Building the command line imports no module that only some commands need."""
    heavy = ("torch", "celery", "sqlalchemy", "pydantic", "rich.table", "workers", "mcp", "httpx", "fastapi")
    built = "import sys, typer.main, kqueue.cli; typer.main.get_command(kqueue.cli.app)"
    code = f"{built}; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_what_every_invocation_has() -> None:
    """All commands have the version, complete summaries in the help, completion, and status 2 for a misspelling."""
    cli = Cli(ROOT)
    assert (cli("--version").returncode, cli("--version").stdout) == (0, f"kqueue {metadata.version('kqueue')}\n")
    for group in ((), ("db",)):
        done = cli(*group, "--help", COLUMNS="60")
        assert (done.returncode, "..." in done.stdout.partition("Commands:")[2]) == (0, False)
    assert cli(_KQUEUE_COMPLETE="complete_bash", COMP_WORDS="kqueue st", COMP_CWORD="1").stdout.split() == ["status"]
    assert (cli("sumbit").returncode, "sumbit" in cli("sumbit").stderr) == (2, True)


def test_output_that_nobody_reads_or_that_cannot_be_written() -> None:
    """With a closed pipe (`| head -1`), a listing exits with 0, and a command with a meaningful status with 141.

    Words on stderr change neither the output nor the status.
    """
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    said = b"kqueue: the output cannot be written: No space left on device\n"
    for output, words, ended in (
        (writer, ["categories"], (0, b"")),
        (writer, ["judge", "--help"], (141, b"")),
        (full, ["categories"], (3, said)),
    ):
        done = subprocess.run([*COMMAND, *words], stdout=output, stderr=subprocess.PIPE, check=False)
        assert (done.returncode, done.stderr) == ended
    for lost in (writer, full):
        words = ["judge", __file__, "gone.py", "lost.py", "--json"]
        done = subprocess.run([*COMMAND, *words], stdout=subprocess.PIPE, stderr=lost, check=False)
        assert (done.returncode, done.stdout.count(b"No such file")) == (2, 2)
    os.close(writer)
    os.close(full)
    closed = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, "evidence"], capture_output=True, check=False)
    assert (closed.returncode, closed.stderr) == (0, b"")


def test_every_error_has_a_status() -> None:
    """Every exception class of kqueue ends a command with one of the documented statuses."""
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.KqueueError)}
    for kind in kinds - {errors.KqueueError}:
        assert any(issubclass(kind, known) for known in STATUSES), kind
        assert exit_status(kind.__new__(kind)) in {2, 3, 4, 5}


def test_text_is_made_harmless() -> None:
    """Line feeds and tabs are printed. Every other control character is escaped."""
    assert clean("a\tb\nc") == "a\tb\nc"
    assert clean("\x00\x07\x1b\x7f\x9b\r\u202e\u2028\ud800") == r"\x00\x07\x1b\x7f\x9b\r\u202e\u2028\ud800"
    assert clean("a\ufe0f\U000e0141\U000e0041") == r"a\ufe0f\U000e0141\U000e0041"
    assert clean("é 漢 [red]x[/]") == "é 漢 [red]x[/]"
    assert one_line(" a\n\tb  c ") == "a b c"
