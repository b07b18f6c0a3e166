"""Whole searches by the real command on a live fleet, with real kernels."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from kqueue.config import Config
from kqueue.local.fleet import LocalFleet
from kqueue.store.engine import connect
from tests.http.serving import Served

pytestmark = pytest.mark.timeout(600)  # the first test starts the fleet, which takes minutes on a busy machine

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
EXAMPLE = EXAMPLES / "search"
#: The fewest calls, and little to wait for.
QUICK = ("--backend", "torch", "--gpu", "cpu", "--checks", "1", "--calls", "20")


def command(
    config: Config, where: Path, *arguments: object, name: str = "search", **more: str
) -> subprocess.CompletedProcess[str]:
    """Run `kqueue search`, or another command, in a folder."""
    done = subprocess.run(
        [sys.executable, "-m", "kqueue", name, *map(str, arguments)],
        cwd=where,
        env=os.environ | config.environment() | more,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def shown(config: Config, where: Path, name: str) -> dict[str, Any]:
    """What `kqueue search show --json` has of a run."""
    return json.loads(command(config, where, "show", name, "--json").stdout)


def test_a_recorded_search_finds_the_known_best(live: LocalFleet, tmp_path: Path) -> None:
    """Options in Trace's spelling; the best of the folder is written, with a curve, and every proposal is a row."""
    done = command(
        live.config,
        tmp_path,
        *("--problem", EXAMPLE / "problem.py", "--recorded", EXAMPLE / "recorded", *QUICK),
        *("--num_steps", 50, "--num_candidates", 1, "--num_threads", 20, "--num_proposals", 1),
        *("--algorithm", "PS", "--log_frequency", 2, "--test_frequency", 2, "--run_name", "known", "--verbose"),
    )
    assert done.returncode == 0, done.stderr
    best = tmp_path / "search-known" / "best.py"
    assert best.read_text() == (EXAMPLE / "recorded" / "04_best.py").read_text()
    assert (tmp_path / "search-known" / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "search-known" / "curve.svg").read_text()
    assert "FAILED: wrong_values" in done.stderr  # verbose
    run = shown(live.config, tmp_path, "known")
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
    engine = connect(live.config.require_database(), application="tests", pool_size=1)
    with engine.connect() as connection:
        judged = connection.scalar(text("SELECT count(*) FROM evaluations WHERE batch = 'known'"))
    engine.dispose()
    assert judged >= 8  # six kernels and two tests; more if a busy machine hid a time
    again = command(live.config, tmp_path, "resume", "known", "--recorded", EXAMPLE / "recorded", "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["best"][0]["number"] == 4
    assert len(shown(live.config, tmp_path, "known")["proposals"]) == 6


def test_a_command_improves_on_its_own_answers(live: LocalFleet, tmp_path: Path) -> None:
    """A proposer that halves the work of what it is given comes far in a few steps, over HTTP and with two metrics."""
    (tmp_path / "mine.py").write_text("def short(verdict):\n    return 1.0 if verdict.passed else 0.0\n")
    served = Served(live.config, tmp_path / "serve.log").start()
    done = command(
        live.config,
        tmp_path,
        *("--problem", EXAMPLE / "problem.py", *QUICK, "--run-name", "halves", "--num-steps", 4),
        *("--proposer", shlex.join([sys.executable, str(EXAMPLE / "proposer.py")])),
        *("--algorithm", "PS_epsNet_Summarizer", "--metric", "inverse_runtime", "--metric", "mine:short"),
        *("--url", served.url, "--json"),
        KQUEUE_TOKEN=served.admin,
    )
    served.stop()
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["best"][0]["number"] > 0
    assert result["best"][0]["scores"]["mine:short"] == 1.0
    run = shown(live.config, tmp_path, "halves")
    first, best = run["proposals"][0], run["proposals"][result["best"][0]["number"]]
    assert best["runtime_ms"] < first["runtime_ms"]
    assert "Better than what it was made from" in run["steps"][-1]["summary"]
    assert run["steps"][-1]["summary"] in run["proposals"][-1]["prompt"]
    both = command(live.config, tmp_path, "compare", "halves", run["id"][:8], "--out", "both")
    assert both.returncode == 0, both.stderr
    assert (tmp_path / "both" / "curve.svg").exists()


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


def test_tuning_finds_the_known_best(live: LocalFleet, tmp_path: Path) -> None:
    """Not to wait is faster than to wait; no parts at all are an error."""
    kernel = tmp_path / "kernel.py"
    kernel.write_text(PAUSES)
    done = command(
        live.config,
        tmp_path,
        *(kernel, "--problem", EXAMPLES / "tune" / "problem.py", "--gpu", "cpu", "--checks", 1, "--calls", 5),
        *("--grid", "PAUSE_MS=400,0", "--grid", "PARTS=1,0", "--repeats", 2, "--run-name", "rows", "--json"),
        name="tune",
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["winner"]["values"] == {"PAUSE_MS": "0", "PARTS": "1"}
    assert record["winner"]["beats_original"]
    assert [one["category"] for one in record["configurations"] if one["values"]["PARTS"] == "0"] == [
        "runtime_error"
    ] * 2
    best = (tmp_path / "tune-rows" / "best.py").read_text()
    assert best == PAUSES.replace("PAUSE_MS = 400\n", "PAUSE_MS = 0\n")
    run = shown(live.config, tmp_path, "rows")
    assert (run["state"], len(run["proposals"])) == ("done", 8)
    # The winner stands alone.
    assert (
        command(
            live.config, tmp_path, EXAMPLES / "tune" / "problem.py", "tune-rows/best.py", "--no-timing", name="judge"
        ).returncode
        == 0
    )
