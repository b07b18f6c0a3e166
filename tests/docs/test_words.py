"""Commands, snippets and settings of the pages name only existing things. test_blocks.py runs them."""

from __future__ import annotations

import configparser
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kqueue.config import load
from kqueue.web.app import create_app
from tests.docs import shell, snippets
from tests.docs.pages import BLOCKS, PAGES, READ, ROOT, RUN, Block, name, words_in

PROGRAMS = re.compile(r"(?:[A-Z_]+=\S+ )*(?:kqueue|make|nohup|python|docker compose) .*")
SETTING = re.compile(r"\bKQUEUE_[A-Z]+(?:_[A-Z]+)*\b")
ROUTE = re.compile(r"(GET|HEAD|POST) (/[\w/{}.-]*)")


def of(*languages: str) -> Any:
    """Return the blocks in some languages as parameters."""
    return pytest.mark.parametrize("block", [one for one in BLOCKS if one.language in languages], ids=str)


def test_every_fence_is_a_block() -> None:
    """Each fence is a block in a known language, and each block that is not run has a reason and could be run."""
    text = "\n".join(page.read_text() for page in PAGES)
    assert len(BLOCKS) == len(re.findall(r"^ *(?:```|~~~)", text, re.MULTILINE)) / 2
    assert len(BLOCKS) > 100
    assert {block.language for block in BLOCKS} <= {*RUN, *READ}
    excused = [block for block in BLOCKS if block.reason]
    assert len(re.findall(r"^<!-- not run:", text, re.MULTILINE)) == len(excused)
    for block in excused:
        assert block.language in RUN, block
        named = re.findall(r"\b(?:tests|examples)/[\w/.]+\w", block.reason)
        assert [path for path in named if not (ROOT / path).exists()] == [], block
        assert len(block.reason) > 10, block


@of("sh")
def test_a_command_names_what_there_is(block: Block) -> None:
    found = shell.commands(block.text)
    assert found or re.fullmatch(r"(\w+='.*'\n)+", block.text)
    functions = re.findall(r"^(\w+)\(\)", block.text, re.MULTILINE)
    assert [(words, fault) for words in found if words[0] not in functions and (fault := shell.fault(words))] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_command_within_a_line_names_what_there_is(page: Path) -> None:
    """Commands within a line are checked like blocks, except that arguments can be missing."""
    named = [words for words in words_in(page.read_text()) if PROGRAMS.fullmatch(words)]
    found = [command for words in named for command in shell.commands(re.sub(r"[\[\]]", "", words))]
    assert [(words, fault) for words in found if (fault := shell.fault(words, whole=False))] == []


@of("python")
def test_a_snippet_names_what_there_is(block: Block) -> None:
    """Snippets compile, and their modules and names of kqueue exist. test_blocks.py calls the methods."""
    snippets.compiled(block.text, str(block))
    assert snippets.faults(block.text) == []


@of("json", "yaml", "ini")
def test_data_can_be_read(block: Block) -> None:
    """JSON, compose files, systemd units and files of settings parse."""
    if block.language == "json":
        json.loads(block.text)
    elif block.language == "yaml":
        assert yaml.load(block.text, shell.Compose)
    elif block.text.startswith("["):
        configparser.ConfigParser(interpolation=None).read_string(block.text)
    else:
        assert all(re.fullmatch(r"[A-Z_]+=\S+", line) for line in block.text.splitlines())


def test_settings_exist() -> None:
    """A program, a script or a compose file reads each `KQUEUE_` variable of a page."""
    fields = {f"KQUEUE_{field.upper()}" for field in type(load()).model_fields}
    folders = [ROOT / folder for folder in ("kqueue", "workers", "scripts", "tests", "docker", "deploy")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    files += [path for path in ROOT.iterdir() if path.is_file() and path.suffix != ".md"]
    read = {found for path in files for found in SETTING.findall(path.read_text(errors="replace"))}
    named = {(page.name, found) for page in PAGES for found in SETTING.findall(page.read_text())}
    assert len(named) > 50
    assert [(page, found) for page, found in sorted(named) if found not in fields | read] == []


def test_routes_exist() -> None:
    """Each route of a page is one of the server."""
    app = create_app(load(database_url="postgresql+psycopg://nowhere/x"))
    paths = {re.sub(r"\{\w+\}", "{}", path) for path in app.openapi()["paths"]}
    told = {
        (page.name, re.sub(r"\{\w+\}", "{}", path).split("?")[0])
        for page in PAGES
        for words in words_in(page.read_text())
        for _, path in ROUTE.findall(words)
    }
    assert len(told) > 20
    assert [(page, path) for page, path in sorted(told) if path not in paths] == []


def test_a_fault_is_seen() -> None:
    """Unknown commands, options, targets, scripts, extras, services, programs and names are found."""
    for words in (
        "kqueue autopsy; kqueue submit --problems a.py b.py; make tests; make bench ARGS='--nothing 3'",
        "python examples/nothing.py; pip install 'kqueue[nothing]'; docker compose run --rm clients status; kqeue up",
    ):
        assert all(shell.fault(command) for command in shell.commands(words)), words
    assert snippets.faults("from kqueue import Nothing") != []
