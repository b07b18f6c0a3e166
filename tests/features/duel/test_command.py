"""`kqueue duel` without a fleet."""

from __future__ import annotations

import json

import pytest

from tests.cli.command import Cli
from tests.cli.machine import *  # noqa: F403

pytestmark = pytest.mark.slow("starts a judge")


@pytest.mark.usefixtures("kept")
def test_a_duel(cli: Cli) -> None:
    """A wrong kernel loses at once, a duel without a decision exits with 1, and bad options with 2."""
    quick = ("--device", "cpu", "--checks", "1", "--calls", "5")
    done = cli("duel", "relu.py", "wrong.py", "right.py", *quick)
    assert (done.returncode, done.stdout.splitlines()) == (
        0,
        ["A is wrong.py, B is right.py", "B wins, because A ended as wrong_values"],
    )
    done = cli("duel", "relu.py", "wrong.py", "wrong.py", *quick, "--json")
    assert (done.returncode, json.loads(done.stdout)["reason"]) == (1, "both_failed")
    for option in (("--lane", "cpu"), ("--fleet", "--device", "cpu"), ("--rounds", "1"), ("--within", "2")):
        assert cli("duel", "relu.py", "right.py", "right.py", *option).returncode == 2
