"""Projects with tests, `kqueue pytest` and pytest runs on them, and their normalized output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.cli.command import Cli

#: Time limit of a command in seconds. It is long because the host can be busy, and no test depends on it.
LIMIT_S = 300

CONFTEST = """
import pytest

def pytest_addoption(parser):
    parser.addoption("--word", default="none")

def pytest_collection_modifyitems(items):
    for item in items:
        if "slowly" in item.name:
            item.add_marker("slow")

@pytest.fixture(scope="session")
def word(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("session")
    print("the session begins")
    yield request.config.getoption("--word")
    assert folder.exists()
"""
FIRST = """
import sys, warnings, pytest

@pytest.mark.parametrize("x", ["a/b", "[c]", "d::e", "\\u00fc"])
def test_named(x, word, tmp_path):
    print("seen", x)
    warnings.warn("careful")
    assert word == "none" and tmp_path.is_dir()

class TestGroup:
    def test_property(self, record_property):
        record_property("size", 3)

    @pytest.mark.xfail(reason="known")
    def test_expected(self):
        assert 0

    def test_fails(self, word):
        print("on stdout")
        print("on stderr", file=sys.stderr)
        assert word == "another"
"""
SECOND = """
import pytest

def test_slowly(): pass

@pytest.mark.skip(reason="not today")
def test_skipped(): pass

def test_fails_too(): raise ValueError("no")

@pytest.fixture
def broken(): raise RuntimeError("fixture")

def test_error(broken): pass
"""

#: The passing tests of DYING.
ALIVE = {"test_first", "test_between", "test_last"}
DYING = """
import ctypes, os, signal, pytest

@pytest.fixture
def dies():
    os._exit(3)

@pytest.fixture
def dies_late():
    yield
    os.kill(os.getpid(), signal.SIGKILL)

def test_first(): pass
def test_segfault():
    print("reached")
    ctypes.string_at(0)
def test_exit(): os._exit(0)
def test_setup(dies): pass
def test_teardown(dies_late): pass
def test_between(): pass
def test_last(): pass
"""


def write_two(cli: Cli) -> None:
    for name, source in {"conftest": CONFTEST, "test_first": FIRST, "test_second": SECOND}.items():
        cli.write(f"{name}.py", source)


def plain(cli: Cli, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "pytest", *arguments], cwd=cli.directory, env={**os.environ, **cli.environment},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip


def body(text: str) -> list[str]:
    """Return pytest's output without header, times and names of written files."""
    lines = re.sub(r"in \d[\d.]*s( \([\d:]+\))?|=+|0x[0-9a-f]+", "", text).splitlines()
    other = ("platform", "plugins:", "kqueue:", "cachedir")
    return [line.strip() for line in lines if not line.startswith(other) and "generated xml file" not in line]


def results(file: Path) -> dict[str, str]:
    """Return each test's result in JUnit's XML: empty if it passed, otherwise the kind and the text of its failure."""
    found: dict[str, str] = {}
    for case in ElementTree.parse(file).getroot().iter("testcase"):
        assert case.attrib["name"] not in found
        said = [f"{one.tag}: {one.attrib.get('message')} {one.text}" for one in case if one.tag in {"failure", "error"}]
        found[case.attrib["name"]] = " ".join(said)
    return found


def dead(file: Path, killed: str) -> dict[str, str]:
    """Return the results of DYING, and assert how each test ended its process."""
    found = results(file)
    for name, kind, words in (
        ("test_segfault", "failure", ["SIGSEGV", "reached", "in test_segfault"]),
        ("test_exit", "failure", ["exit status 0"]),
        ("test_setup", "error", ["exit status 3"]),
        ("test_teardown", "error", [killed]),
    ):
        assert found[name].startswith(kind)
        assert all(word in found[name] for word in words), found[name]
    return found


def cases(file: Path) -> list[str]:
    """Return the cases of a JUnit file without times, hosts and addresses."""
    text = re.sub(r' (time|timestamp|hostname)="[^"]*"|0x[0-9a-f]+', "", file.read_text())
    return sorted(re.split(r"(?=<testcase)", text.replace("</testsuite></testsuites>", "")))


@contextmanager
def running(cli: Cli, *options: str) -> Generator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "kqueue", "pytest", *options], cwd=cli.directory,
        env={**os.environ, **cli.environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
