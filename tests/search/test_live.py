"""Whole searches by the real command on a live fleet, with real kernels."""

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

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
EXAMPLE = EXAMPLES / "search"
RECORDED = EXAMPLE / "recorded"
#: The fewest calls, and little to wait for.
QUICK = ("--backend", "torch", "--gpu", "cpu", "--checks", "1", "--calls", "20")


@pytest.fixture
def cli(live: LocalFleet, tmp_path: Path) -> Cli:
    """The command with the fleet's settings, in an empty folder."""
    return Cli(tmp_path, live.config.environment())


def ran(cli: Cli, *arguments: object, **more: str) -> Done:
    """Run a command that must succeed."""
    done = cli(*map(str, arguments), **more)
    assert done.returncode == 0, done.stderr
    return done


def shown(cli: Cli, name: str) -> dict[str, Any]:
    """Return a run as `kqueue search show --json` prints it."""
    return json.loads(ran(cli, "search", "show", name, "--json").stdout)


def test_a_search_on_a_fleet(cli: Cli) -> None:
    """A search with a real judge takes the faster kernel and rejects the wrong one."""
    for name in ("03_wrong.py", "04_best.py"):
        cli.write(f"kernels/{name}", (RECORDED / name).read_text())
    given = ("--problem", EXAMPLE / "problem.py", "--recorded", "kernels", *QUICK, "--run-name", "short")
    ran(cli, "search", *given, "--num-steps", 2)
    assert [one["category"] for one in shown(cli, "short")["proposals"]] == ["passed", "wrong_values", "passed"]
    assert (cli.directory / "search-short" / "best.py").read_text() == (RECORDED / "04_best.py").read_text()


@pytest.mark.nightly
def test_a_recorded_search_finds_the_known_best(cli: Cli, live: LocalFleet) -> None:
    """Options in Trace's spelling; the best of the folder is written, with a curve, and every proposal is a row."""
    done = ran(
        cli,
        *("search", "--problem", EXAMPLE / "problem.py", "--recorded", RECORDED, *QUICK),
        *("--num_steps", 50, "--num_candidates", 1, "--num_threads", 20, "--num_proposals", 1),
        *("--algorithm", "PS", "--log_frequency", 2, "--test_frequency", 2, "--run_name", "known", "--verbose"),
    )
    folder = cli.directory / "search-known"
    assert (folder / "best.py").read_text() == (RECORDED / "04_best.py").read_text()
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "curve.svg").read_text()
    assert "FAILED: wrong_values" in done.stderr  # verbose
    run = shown(cli, "known")
    assert run["state"] == "done"
    assert [one["category"] for one in run["proposals"]] == [
        *("passed", "entry_point_missing", "passed", "wrong_values", "passed", "passed")
    ]
    assert [step["best"] for step in run["steps"]][-2:] == [4, 4]
    # Proposals are made from the best that is known, which half as many passes may or may not be on a busy machine.
    parents = [one["parent"] for one in run["proposals"]]
    assert (parents[:3], parents[5]) == ([None, 0, 0], 4)
    assert set(parents[3:5]) <= {0, 2}
    assert "half" in run["proposals"][2]["answer"].lower()
    assert "Start from this kernel" in run["proposals"][2]["prompt"]
    assert run["proposals"][3]["feedback"].startswith("FAILED: wrong_values")
    assert [step["number"] for step in run["steps"] if step["test"]] == [2, 4]
    with live.client() as client:
        assert len(client.batch("known")) >= 8  # six kernels and two tests; more if a busy machine hid a time
    again = ran(cli, "search", "resume", "known", "--recorded", RECORDED, "--json")
    assert json.loads(again.stdout)["best"][0]["number"] == 4
    assert len(shown(cli, "known")["proposals"]) == 6


@pytest.mark.nightly
def test_a_command_improves_on_its_own_answers(cli: Cli, live: LocalFleet) -> None:
    """A proposer that halves the work of what it is given comes far in a few steps, over HTTP and with two metrics."""
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
    assert "Better than what it was made from" in run["steps"][-1]["summary"]
    assert run["steps"][-1]["summary"] in run["proposals"][-1]["prompt"]
    ran(cli, "search", "compare", "halves", run["id"][:8], "--out", "both")
    assert (cli.directory / "both" / "curve.svg").exists()


#: On a busy host a call that takes no time takes tens of milliseconds: the pause is far above that.
PAUSES = """
import time
import torch

PAUSE_MS = 400
PARTS = 1


class ModelNew(torch.nn.Module):
    def forward(self, x):
        time.sleep(PAUSE_MS / 1000)
        return torch.cat([part.sum(dim=1) for part in x.chunk(PARTS)])
"""


@pytest.mark.nightly
def test_tuning_finds_the_known_best(cli: Cli) -> None:
    """Not to wait is faster than to wait; no parts at all are an error."""
    cli.write("kernel.py", PAUSES)
    problem = EXAMPLES / "tune" / "problem.py"
    done = ran(
        cli,
        *("tune", "kernel.py", "--problem", problem, "--gpu", "cpu", "--checks", 1, "--calls", 5),
        *("--grid", "PAUSE_MS=400,0", "--grid", "PARTS=1,0", "--repeats", 2, "--run-name", "rows", "--json"),
    )
    record = json.loads(done.stdout)
    assert (record["winner"]["values"], record["winner"]["beats_original"]) == ({"PAUSE_MS": "0", "PARTS": "1"}, True)
    wrong = [one["category"] for one in record["configurations"] if one["values"]["PARTS"] == "0"]
    assert wrong == ["runtime_error"] * 2
    best = cli.directory / "tune-rows" / "best.py"
    assert best.read_text() == PAUSES.replace("PAUSE_MS = 400\n", "PAUSE_MS = 0\n")
    run = shown(cli, "rows")
    assert (run["state"], len(run["proposals"])) == ("done", 8)
    assert cli.process("judge", str(problem), str(best), "--no-timing").returncode == 0
