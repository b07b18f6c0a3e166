"""Commands, snippets and settings of the pages name only what there is, run or not (test_blocks.py runs them)."""

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
from tests.docs.pages import BLOCKS, PAGES, READ, ROOT, RUN, Block, blocks_in, name, words_in

PROGRAMS = re.compile(r"(?:[A-Z_]+=\S+ )*(?:kqueue|make|nohup|python|docker compose) .*")
SETTING = re.compile(r"\bKQUEUE_[A-Z]+(?:_[A-Z]+)*\b")
ROUTE = re.compile(r"(GET|HEAD|POST) (/[\w/{}.-]*)")


def of(*languages: str) -> Any:
    """The blocks in some languages, as parameters."""
    return pytest.mark.parametrize("block", [one for one in BLOCKS if one.language in languages], ids=str)


def test_every_fence_is_a_block() -> None:
    """None begins within a line or in an unknown language. What is not run could be, for a reason that holds."""
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


def test_what_is_printed_is_no_command() -> None:
    """A block without a language is what a program prints: commands in one would not be looked at."""
    lines = [(str(block), line) for block in BLOCKS if not block.language for line in block.text.splitlines()]
    command = re.compile(r"(kqueue|make|pip|python|docker|curl) [^:]*$")
    drawn = re.compile(r"\S {3,}[^#\s]")
    assert [where for where, line in lines if command.match(line) and not drawn.search(line)] == []


@of("sh")
def test_a_command_names_what_there_is(block: Block) -> None:
    """Programs, commands of `kqueue`, options, targets, scripts, extras and services of compose."""
    found = shell.commands(block.text)
    assert found or re.fullmatch(r"(\w+='.*'\n)+", block.text)
    functions = re.findall(r"^(\w+)\(\)", block.text, re.MULTILINE)
    assert [(words, fault) for words in found if words[0] not in functions and (fault := shell.fault(words))] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_command_within_a_line_names_what_there_is(page: Path) -> None:
    """As in blocks; arguments may be left out."""
    named = [words for words in words_in(page.read_text()) if PROGRAMS.fullmatch(words)]
    found = [command for words in named for command in shell.commands(re.sub(r"[\[\]]", "", words))]
    assert [(words, fault) for words in found if (fault := shell.fault(words, whole=False))] == []


@of("python")
def test_a_snippet_names_what_there_is(block: Block) -> None:
    """It compiles; modules, names, methods and keywords of kqueue are there."""
    snippets.compiled(block.text, str(block))
    assert snippets.faults(block.text) == []


@of("json", "yaml", "ini")
def test_data_can_be_read(block: Block) -> None:
    """JSON, compose files, units of systemd, and files of settings."""
    if block.language == "json":
        json.loads(block.text)
    elif block.language == "yaml":
        assert yaml.load(block.text, shell.Compose)
    elif block.text.startswith("["):
        configparser.ConfigParser(interpolation=None).read_string(block.text)
    else:
        assert all(re.fullmatch(r"[A-Z_]+=\S+", line) for line in block.text.splitlines())


def test_settings_exist() -> None:
    """Each `KQUEUE_` variable that a page names is read by a program, a script or a compose file."""
    fields = {f"KQUEUE_{field.upper()}" for field in type(load()).model_fields}
    folders = [ROOT / folder for folder in ("kqueue", "workers", "scripts", "tests", "docker", "deploy")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    files += [path for path in ROOT.iterdir() if path.is_file() and path.suffix != ".md"]
    read = {found for path in files for found in SETTING.findall(path.read_text(errors="replace"))}
    named = {(page.name, found) for page in PAGES for found in SETTING.findall(page.read_text())}
    assert len(named) > 50
    assert [(page, found) for page, found in sorted(named) if found not in fields | read] == []


def test_routes_exist() -> None:
    """Each route that a page names is one of the server."""
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


FAULTS = """
kqueue judges a.py b.py
kqueue submit --problems a.py b.py
kqueue submit a.py b.py c.py --jsonl
kqueue autopsy
kqueue gpu drain
make tests
make bench ARGS='--nothing 3'
make quick ARG=3
python examples/nothing.py
python examples/demo.py --nothing
pip install 'kqueue[nothing]'
docker compose run --rm clients status
docker compose run --rm client statuses
docker compose exec worker kqueue doctors
kubectl -n kqueue exec deployment/client -- kqueue statuses
A=1 nohup kqueue ups &
kqeue up
"""
WRONG = [
    "from kqueue import Nothing",
    "import kqueue\nkqueue.nothing",
    "import kqueue\nkqueue.judge(problem='', kernels='')",
    "from kqueue import Client\nwith Client() as kq:\n    kq.nothing()",
    "from kqueue import Client\nwith Client() as kq:\n    kq.submit_batch([], nothing=1)",
    "import kqueue\nwith kqueue.LocalJudge() as judge:\n    judge(problem='', kernels='')",
]


def test_a_fault_is_seen() -> None:
    """A command, option, target, name or keyword that does not exist is found, wherever it stands in a line."""
    for words in FAULTS.strip().splitlines():
        [command] = shell.commands(f"echo $(true); {words} | cat > out   # a word")[2:-1]
        assert shell.fault(command) is not None, words
    assert [text for text in WRONG if not snippets.faults(text)] == []


def test_pages_are_read() -> None:
    """Shell with comments, continued lines, here-documents and redirections; blocks with their lines and reasons."""
    text = "A=1 B='x y' one 'a # b' \\\n  two # three\ncat > f <<'EOF'\nnot a command\nEOF\n"
    text += "C=$(four five) && six 2>&1 < g\n"
    assert shell.commands(text) == [["one", "a # b", "two"], ["cat"], ["four", "five"], ["six", "2"]]
    text = "# A\n\n<!-- not run: it is long -->\n```sh\nmake `x`\n```\n\nSay `a\nb`.\n\n```sql\nSELECT 1;\n```\n"
    first, second = blocks_in(text, "page.md")
    assert (first.line, first.runs, first.reason, second.line, second.runs) == (4, False, "it is long", 11, True)
    assert words_in(text) == ["a b"]
