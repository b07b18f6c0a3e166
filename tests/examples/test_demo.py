"""The demo with a separate fleet, and examples without a fleet."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.services

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DEMO = EXAMPLES / "demo.py"

#: Set in CI with a GPU, where a missing GPU is a failure.
WANTED = bool(os.environ.get("KQUEUE_REQUIRE_GPU"))
GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not WANTED and not Path("/dev/nvidia0").exists(), reason="there is no GPU here"),
)
#: Runs the demo over a gallery that expects every kernel to pass.
HOPEFUL = """
import dataclasses, runpy, sys
sys.path.insert(0, sys.argv[1])
import gallery
from kqueue import Category
real = gallery.entries
gallery.entries = lambda lane=None: [dataclasses.replace(e, expected=Category.PASSED) for e in real(lane)]
sys.argv = [DEMO, "--lane", "cpu", "--only", "bad/runtime_error", "good/torch/gelu"]
runpy.run_path(DEMO, run_name="__main__")
"""


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program with captured output and without a fleet of this machine in its environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KQUEUE_")}
    return subprocess.run([sys.executable, *command], env=kept | environment, capture_output=True, text=True)


@pytest.mark.nightly
@pytest.mark.timeout(0)  # no timeout: a slow machine needs long, and the demo gives up by itself if no verdicts come
@pytest.mark.parametrize("lane", ["cpu", pytest.param("gpu", marks=GPU)])
def test_the_whole_gallery(tmp_path: Path, lane: str) -> None:
    """Every entry has its expected category and a line, and only passed kernels have times, except interpreted ones."""
    done = run(DEMO, "--all", "--lane", lane, "--json", tmp_path / "verdicts.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"lane {lane}" in done.stdout
    records = json.loads((tmp_path / "verdicts.json").read_text())
    assert len(records) > 60
    assert {r["name"]: r["verdict"]["category"] for r in records} == {r["name"]: r["expected"] for r in records}
    came, _, _ = done.stdout.partition("baseline ms")
    for record in records:
        verdict = record["verdict"]
        timed = verdict["runtime"] is not None and verdict["baseline"] is not None
        interpreted = lane == "cpu" and verdict["backend"] == "triton"
        assert timed == (record["expected"] == "passed" and not interpreted), record["name"]
        assert re.search(rf" s +\d+/{len(records)} +{record['name']} +{record['expected']}\n", came)


@pytest.mark.nightly
@pytest.mark.timeout(0)
def test_an_unexpected_category_fails_the_demo() -> None:
    """The demo prints a line per verdict, explains an unexpected one, and exits with 1."""
    done = run("-c", HOPEFUL.replace("DEMO", repr(str(DEMO))), EXAMPLES)
    assert done.returncode == 1, done.stderr
    assert re.search(r" s +\d/2 +good/torch/gelu +passed\n", done.stdout)
    assert re.search(r" s +\d/2 +bad/runtime_error +runtime_error\b", done.stdout)
    assert "bad/runtime_error: expected passed, got runtime_error in the phase check" in done.stdout
    assert "expects a multiple of 7 rows" in done.stdout
    assert "1 of 2 as expected" in done.stdout


def test_without_a_fleet_an_example_says_what_to_start(tmp_path: Path) -> None:
    """An example without its fleet exits with one line that names the command to start one."""
    done = run(EXAMPLES / "first_script.py", KQUEUE_HOME=str(tmp_path))
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert "kqueue up" in line
