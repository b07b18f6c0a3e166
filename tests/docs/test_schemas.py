"""The published schemas: the code keeps them, and the comparison finds what breaks them."""

from __future__ import annotations

import copy
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
Tree = dict[str, Any]


@pytest.fixture(scope="module")
def schemas() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "schemas.py")))


def test_the_code_keeps_the_published_schemas(schemas: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    """The code accepts and returns what the published schemas promise. `make schemas` publishes an intended break."""
    assert (schemas.main(["--check"]), capsys.readouterr().out) == (0, "")


def _submit(tree: Tree) -> Tree:
    return tree["paths"]["/v1/evaluations"]["post"]


#: Changes of a schema, each with the words that report it. There are none for a compatible change.
CHANGES: list[tuple[str, Callable[[Tree], object], str]] = [
    ("verdict", lambda tree: tree["properties"].pop("speedup"), "verdict.speedup is gone"),
    ("verdict", lambda tree: tree["required"].remove("category"), "verdict.category is optional now"),
    ("verdict", lambda tree: tree["$defs"]["Category"]["enum"].remove("crashed"), "verdict.category: crashed is gone"),
    ("verdict", lambda tree: tree["$defs"]["Category"]["enum"].append("melted"), ""),
    ("verdict", lambda tree: tree["properties"]["message"].update(type="integer"), "message: integer is possible"),
    ("verdict", lambda tree: tree["properties"].update(more={"type": "string"}), ""),
    ("receipt", lambda tree: tree["properties"].pop("owner"), "receipt.owner is gone"),
    ("receipt", lambda tree: tree["$defs"]["Verdict"]["required"].remove("category"), "verdict.category is optional"),
    ("request", lambda tree: tree["required"].append("lane"), "request.lane is required now"),
    ("request", lambda tree: tree["properties"].update(more={"type": "string"}), ""),
    ("request", lambda tree: tree["properties"]["lane"].update(maxLength=3), "request.lane: maxLength is 3 now"),
    ("http", lambda tree: tree["paths"].pop("/v1/fleet"), "GET /v1/fleet is gone"),
    ("http", lambda tree: _submit(tree)["responses"].clear(), "answers 201 application/json: it is gone"),
    ("http", lambda tree: _submit(tree).pop("requestBody"), "POST /v1/evaluations takes application/json: it is gone"),
    ("python", lambda tree: tree.pop("Client.submit"), "Client.submit is gone"),
    ("python", lambda tree: tree["Client.get"].update(more=True), "Client.get: more is required now"),
    ("python", lambda tree: tree["Client.get"].update(more=False), ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "words"), CHANGES)
def test_a_breaking_change_is_found(
    schemas: SimpleNamespace, name: str, change: Callable[[Tree], object], words: str
) -> None:
    """A removed or narrowed part is reported. An addition is not."""
    old = json.loads((ROOT / "docs" / "schemas" / f"{name}.json").read_text())
    new = copy.deepcopy(old)
    change(new)
    found = list(schemas.broken(name, old, new))
    assert bool(found) == bool(words), found
    assert words in "".join(found)
