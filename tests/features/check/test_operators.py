"""The list of a repository's operators, the files on which they depend, and reports."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import yaml

from kqueue.errors import InvalidRequest
from kqueue.features.check import imports, reports
from kqueue.features.check.command import check
from kqueue.features.check.operators import read
from kqueue.features.check.run import Row, State
from tests.docs.pages import BLOCKS, ROOT
from tests.features.check.repositories import LIST

ROWS = [Row(f"a|`{state.name}", state, "@all <b>\x1b[31m") for state in State]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("[[operator]]", "[[operator"), "no TOML"),
        (('"torch:mul"', '"torch"'), "reference: give `base`"),
        (('"mine.ops:scale"', '"mine.ops"'), "scale.import: "),
        (('"mine.ops:scale"', '"torch.ops:scale"'), "scale: the judge has its own module torch"),
        (('["m", "n"]', '["m", "k"]'), r"shapes: .* has no size k"),
        (('["m", "n"]', '"torch.randn(m"'), "is no expression of Python"),
        (("x = [", "entry = ["), "'entry' is no name for an input or a size"),
        (("n = 32", "n = [9, 1]"), r"the range \[9, 1\] is empty"),
        (("n = 32", "n = -1"), "shapes"),
        (("shapes", "tolerance = { atol = -1, rtol = 0 }\nshapes"), "tolerance.atol"),
        (("shapes", "shape"), "scale: unknown key `shape`: did you mean `shapes`"),
        (("root", "roots"), "unknown key `roots`: did you mean `root`"),
        (('root = "src"', 'root = "../src"'), "root"),
        (('root = "src"', 'build = "make"'), "build: "),
        (('root = "src"', 'build = ["make", "a\\nb"]'), "build.2: "),
        (("\n[[", LIST.partition('"src"')[2] + "\n[["), "two operators are called scale"),
    ],
)  # fmt: skip
def test_a_malformed_list(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    """The message names the file, the operator and the correction."""
    (tmp_path / "list").write_text(LIST.replace(*change))
    with pytest.raises(InvalidRequest, match=words) as refused:
        read(tmp_path / "list", "kqueue.toml of head")
    assert str(refused.value).startswith("kqueue.toml of head: ")


def test_the_documents_list(tmp_path: Path) -> None:
    """The page's example is a list of operators, of at most 20 lines."""
    [block] = [block for block in BLOCKS if block.language == "toml"]
    (tmp_path / "list").write_text(block.text)
    assert [*read(tmp_path / "list", "list").by_name] == ["rms_norm"]
    assert block.text.count("\n") <= 20


def test_a_drawn_size_is_in_its_range(tmp_path: Path) -> None:
    """Each size of a range can be drawn, and no other. Each shape is judged in each dtype."""
    (tmp_path / "list").write_text(LIST.replace("n = 32", "n = [1, 3]") + 'dtypes = ["fp32", "bf16"]\n')
    [operator] = read(tmp_path / "list", "list").by_name.values()
    drawn = [[*operator.cases()] for _ in range(200)]
    assert {case.sizes["n"] for cases in drawn for case in cases} == {1, 2, 3}
    assert [case.dtype for case in drawn[0]] == ["fp32", "bf16"]
    assert {(case.shape, case.drawn) for case in drawn[0]} == {("m=4, n=1..3", f"n={drawn[0][0].sizes['n']}")}


@pytest.mark.parametrize(
    ("changed", "touched"),
    [
        ("src/mine/parts.py", True),
        ("src/mine/__init__.py", True),
        ("src/mine/kernel.cu", True),
        ("setup.py", True),
        ("src/mine/other.py", False),
        ("tests/test_a.py", False),
        ("README.md", False),
    ],
)
def test_an_operator_depends_on_what_it_imports(tmp_path: Path, changed: str, touched: bool) -> None:
    """Imports are followed, absolute and relative ones. Files that are no modules count for their package."""
    files = {"ops.py": "from . import parts", "parts.py": "import mine.ops", "__init__.py": "", "other.py": "1 +"}
    for name, text in files.items():
        (tmp_path / "src/mine").mkdir(parents=True, exist_ok=True)
        (tmp_path / "src/mine" / name).write_text(text)
    listed = frozenset(f"src/mine/{name}" for name in files)
    found = imports.closure(tmp_path, listed, "src", "mine.ops:scale")
    assert set(found) == listed - {"src/mine/other.py"}
    assert bool(imports.touched(frozenset({changed}), found)) is touched
    assert bool(imports.touched(frozenset({changed, "csrc/kernel.cu"}), found)) is touched
    assert imports.touched(frozenset({changed, "csrc/kernel.cu"}), found, built=True)


def test_the_reason_of_a_row_names_the_import(tmp_path: Path) -> None:
    """A package that imports all operators makes each depend on all."""
    files = {
        "mine/__init__.py": "from .b import g",
        "mine/a.py": "def f(): ...",
        "mine/b.py": "def g(): ...",
        "x.cu": "",
    }
    (tmp_path / "mine").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    found = imports.closure(tmp_path, frozenset(files), "", "mine.a:f")
    reasons = [imports.touched(frozenset({name}), found) for name in ("mine/b.py", "mine/a.py", "x.cu")]
    assert reasons == ["mine/__init__.py imports the changed mine/b.py", "mine/a.py changed", "x.cu changed"]


@pytest.mark.parametrize(
    ("source", "defined"),
    [("def f(): ...", True), ("from a import b as f", True), ("from a import *", True), ("f: int = 1", True),
     ("if x:\n  class f: ...", True), ("1 +", True), ("def g(): f()", False), ("import f.g as h", False)],
)  # fmt: skip
def test_a_module_defines_a_name(tmp_path: Path, source: str, defined: bool) -> None:
    """In doubt it does."""
    (tmp_path / "a.py").write_text(source)
    assert imports.defines(tmp_path / "a.py", "f") is defined


def test_reports_quote_foreign_text() -> None:
    """A row of Markdown has one line whose foreign text is code, and JUnit counts each state in its own way."""
    table = [line for line in reports.markdown("b" * 40, "h" * 40, ROWS).splitlines() if line.startswith("| ")]
    assert [line.count("`") for line in table[1:]] == [4] * len(ROWS)
    assert all(r"`a\|'" in line and r"`@all <b>\x1b[31m`" in line for line in table[1:])
    suite = ET.fromstring(reports.junit("b", "h", ROWS))
    assert {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "5", "failures": "2", "errors": "1", "skipped": "1",
    }  # fmt: skip
    assert [case[0].tag for case in suite] == ["system-out", "failure", "failure", "error", "skipped"]
    assert "speed" not in table[0]
    assert "| speed | |" in reports.markdown("b", "h", [replace(ROWS[0], speed=1.0, interval=(0.99, 1.01)), *ROWS])


@pytest.mark.parametrize(("states", "status"), [("01234", 1), ("0234", 6), ("034", 3), ("04", 0), ("", 0)])
def test_the_status_is_the_worst_rows(states: str, status: int) -> None:
    """Wrong comes before slower, and slower before what could not be judged."""
    assert reports.status_of([ROWS[int(number)] for number in states]) == status


@pytest.mark.parametrize("name", ["action.yml", "gitlab.yml"])
def test_templates_call_the_command(name: str) -> None:
    """The options that an action or a template gives are the command's."""
    text = (ROOT / "deploy/check" / name).read_text()
    assert yaml.safe_load(text)
    given = set(re.findall(r"(?<=--)[a-z]+(?:-[a-z]+)*", text)) - {"quiet"}
    assert {"base", "url", "lane", "markdown", "junit", "only-changed"} == given
    assert given <= {one.replace("_", "-") for one in inspect.signature(check).parameters}
