"""The demo and the first script, through a fleet of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kqueue.categories import Blame, Category
from kqueue.config import load
from kqueue.local.fleet import LocalFleet

pytestmark = pytest.mark.services

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DEMO = EXAMPLES / "demo.py"

#: Set in CI that has a GPU: there a missing one is a failure.
WANTED = bool(os.environ.get("KQUEUE_REQUIRE_GPU"))

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
    """A Python program with its output captured, and no fleet of this machine in its environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KQUEUE_")}
    return subprocess.run([sys.executable, *command], env=kept | environment, capture_output=True, text=True)


def whole_gallery(lane: str, file: Path) -> None:
    """Every entry of the lane gets its expected category, and the demo says so."""
    done = run(DEMO, "--all", "--lane", lane, "--json", file)  # it gives up by itself if no verdict comes
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"lane {lane}" in done.stdout
    records = json.loads(file.read_text())
    assert len(records) > 60
    assert {r["name"]: r["verdict"]["category"] for r in records} == {r["name"]: r["expected"] for r in records}
    for record in records:
        timed = record["verdict"]["runtime"] is not None and record["verdict"]["baseline"] is not None
        assert timed == (record["expected"] == "passed"), record["name"]


@pytest.mark.timeout(0)  # a slow machine may take long, as long as verdicts come
def test_the_whole_gallery_on_the_cpu(tmp_path: Path) -> None:
    """Every entry gets its expected category on the cpu lane; passed kernels alone have times."""
    whole_gallery("cpu", tmp_path / "verdicts.json")


@pytest.mark.gpu
@pytest.mark.skipif(not WANTED and not Path("/dev/nvidia0").exists(), reason="there is no GPU here")
@pytest.mark.timeout(0)  # a slow machine may take long, as long as verdicts come
def test_the_whole_gallery_on_a_gpu(tmp_path: Path) -> None:
    """Every entry gets its expected category on the gpu lane; passed kernels alone have times."""
    whole_gallery("gpu", tmp_path / "verdicts.json")


def test_an_unexpected_category_fails_the_demo() -> None:
    """Where a verdict is not the expected one the demo explains it and its exit status is 1."""
    done = run("-c", HOPEFUL.replace("DEMO", repr(str(DEMO))), EXAMPLES)
    assert done.returncode == 1, done.stderr
    assert "bad/runtime_error: expected passed, got runtime_error in the phase check" in done.stdout
    assert "expects a multiple of 7 rows" in done.stdout
    assert "1 of 2 as expected" in done.stdout


@pytest.mark.timeout(0)  # a slow machine may take long, as long as verdicts come
def test_a_short_demo_says_each_verdict_as_it_comes(tmp_path: Path) -> None:
    """By default a few entries of each kind are judged, and each verdict has its line before the table."""
    done = run(DEMO, "--lane", "cpu", "--json", tmp_path / "verdicts.json")
    assert done.returncode == 0, done.stdout + done.stderr
    records = json.loads((tmp_path / "verdicts.json").read_text())
    assert {Category(record["verdict"]["category"]).blame for record in records} >= {*Blame} - {
        Blame.FLEET,
        Blame.NOBODY,
    }
    came, _, _ = done.stdout.partition("baseline ms")
    for record in records:
        assert re.search(rf" s +\d+/{len(records)} +{record['name']} +{record['expected']}\n", came)


def test_an_unknown_entry_is_refused() -> None:
    """A name that the gallery does not have ends the demo at once, and says where names are."""
    done = run(DEMO, "--only", "bad/nothing")
    assert done.returncode == 1
    assert "the gallery has no entry bad/nothing" in done.stderr


@pytest.mark.parametrize(
    "name",
    [
        "first_script",
        "remote_client",
        "eval_client",
        "job_client",
        "modal_evaluator",
        "trace_guide",
        "rewards",
        "agent",
    ],
)
def test_without_a_fleet_an_example_says_what_to_start(name: str, tmp_path: Path) -> None:
    """An example that needs a fleet ends with one line that tells how to start one."""
    nobody = ["http://127.0.0.1:1"] if name in {"eval_client", "job_client"} else []
    done = run(EXAMPLES / f"{name}.py", *nobody, KQUEUE_HOME=str(tmp_path))
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert "kqueue up" in line


def test_the_first_script() -> None:
    """The README's script finds a fleet that runs on this machine and prints that its kernel passed."""
    with tempfile.TemporaryDirectory(prefix="kqueue-test-") as name:
        root = Path(name)
        root.chmod(0o711)  # pytest's own folders are closed to candidates
        config = load(home=root / "home", scratch=root / "scratch", gpus="none", cpu_slots=1)
        with LocalFleet(config, durable=False):
            done = run(EXAMPLES / "first_script.py", KQUEUE_HOME=str(root / "home"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("passed: ")
