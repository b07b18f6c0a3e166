"""Complete searches by the command on a live fleet, with real kernels."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from kqueue.local.fleet import LocalFleet
from tests.cli.command import Cli, Done
from tests.http.serving import Served

pytestmark = pytest.mark.timeout(600)  # the first test starts the fleet, which takes minutes on a busy machine

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "search"
#: Settings with the fewest calls and short waits.
QUICK = ("--backend", "torch", "--gpu", "cpu", "--checks", "1", "--calls", "20")


@pytest.fixture
def cli(live: LocalFleet, tmp_path: Path) -> Cli:
    """Return the command with the fleet's settings in an empty folder."""
    return Cli(tmp_path, live.config.environment())


def ran(cli: Cli, *arguments: object, **more: str) -> Done:
    done = cli(*map(str, arguments), **more)
    assert done.returncode == 0, done.stderr
    return done


def shown(cli: Cli, name: str) -> dict[str, Any]:
    return json.loads(ran(cli, "search", "show", name, "--json").stdout)


@pytest.mark.nightly
def test_a_command_improves_on_its_own_answers(cli: Cli, live: LocalFleet) -> None:
    """A proposer that halves a kernel's work improves it in a few steps, over HTTP and with two metrics."""
    cli.write("mine.py", "def short(verdict):\n    return 1.0 if verdict.passed else 0.0\n")
    served = Served(live.config, cli.directory / "serve.log").start()
    done = ran(
        cli,
        *("search", "--problem", EXAMPLE / "problem.py", *QUICK, "--run-name", "halves", "--num-steps", 4),
        *("--proposer", shlex.join([sys.executable, str(EXAMPLE / "proposer.py")])),
        *("--algorithm", "PS_epsNet_Summarizer", "--metric", "inverse_runtime", "--metric", "mine:short"),
        *("--url", served.url, "--json"),
        KQUEUE_TOKEN=served.admin,
    )
    served.stop()
    best = json.loads(done.stdout)["best"][0]
    assert (best["number"] > 0, best["scores"]["mine:short"]) == (True, 1.0)
    run = shown(cli, "halves")
    assert run["proposals"][best["number"]]["runtime_ms"] < run["proposals"][0]["runtime_ms"]
    assert "Better than their parents" in run["steps"][-1]["summary"]
    assert run["steps"][-1]["summary"] in run["proposals"][-1]["prompt"]
    ran(cli, "search", "compare", "halves", run["id"][:8], "--out", "both")
    assert (cli.directory / "both" / "curve.svg").exists()
