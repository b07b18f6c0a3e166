"""Features that other packages register."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.installing import install, run

SOURCE = """
from dataclasses import dataclass
from fastapi import APIRouter
from kqueue.registry import Command, Feature

router, NAME, find = APIRouter(), "mine", lambda path: path.suffix == ".mine"

@router.get("/v1/mine")
async def mine() -> str:
    return ""

def greet() -> None:
    "Greet."
    print("hello")

@dataclass(frozen=True)
class Seen:
    doors: int

class Methods:
    async def wink(self) -> str:
        return "wink"

MINE = Feature(
    name="mine", commands=(Command("greet", "third:greet", "wait"), Command("show", "third:greet", "judge")),
    router="third:router", client="third:Methods", names={"greet": "third"}, trials=("mine-",), formats=("third",),
    record="third:Seen",
)
"""
PROGRAM = """
from pathlib import Path
import typer.main
import kqueue
from kqueue import formats
from kqueue.cli import app
from kqueue.config import load
from kqueue.http.app import create_app

root = typer.main.get_command(app)
names = root.list_commands(None)
assert names[names.index("wait") + 1] == "greet", names
assert root.get_command(None, "show").help.startswith("Show one evaluation."), "a feature replaced a command"
api = create_app(load(database_url="postgresql+psycopg://nowhere/none")).openapi()
assert "/v1/mine" in api["paths"]
assert {"mine", "probes", "workers"} <= {*api["components"]["schemas"]["Fleet"]["properties"]}
assert kqueue.Client(database_url="postgresql+psycopg://nowhere/none").wink() == "wink"
assert formats.recognise(Path("a.mine")) == "mine"
assert kqueue.greet.__module__ == "third"
root(["greet"])
"""


def test_another_package_adds_a_feature(tmp_path: Path) -> None:
    """Its command, route, method, name, format and record follow from its description. It replaces no command."""
    install(tmp_path, "mine", "third:MINE", SOURCE, group="kqueue.features")
    done = run(tmp_path, PROGRAM)
    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr


def test_the_house_works_without_features(tmp_path: Path) -> None:
    """A supervisor and its sweep load, and the state of the fleet has the house's fields only."""
    program = "import kqueue.registry as r; r.features = dict; import kqueue.sweeper, workers.fleet\n"
    program += "from kqueue.store.reports.overview import FleetState; print(FleetState([], []))"
    assert run(tmp_path, program).stdout == "FleetState(workers=[], gpus=[])\n"


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [("duel", "kqueue.features.duel:DUEL", "has the name of another feature"), ("mine", "third:x", "cannot be loaded")],
)
def test_a_registration_that_cannot_be_used_is_named(tmp_path: Path, name: str, value: str, error: str) -> None:
    install(tmp_path, name, value, SOURCE, group="kqueue.features")
    done = run(tmp_path, "from kqueue import registry; registry.features()")
    assert f"kqueue.errors.ConfigError: the feature {name} ({value}) {error}" in done.stderr
