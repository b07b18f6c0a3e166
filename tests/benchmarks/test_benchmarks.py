"""The benchmarks that a host without a GPU can run, each as small as it can be: what they say is not looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
#: A program of minutes may take a few more on a busy host.
LIMIT_S = 600
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(LIMIT_S + 60)]


def run(name: str, *arguments: str | Path, statuses: tuple[int, ...] = (0,)) -> str:
    """Run a benchmark as a user does; return what it prints."""
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode in statuses, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def read(path: Path) -> Any:
    """Return the figures that one has written."""
    return json.loads(path.read_text())


def test_speed(tmp_path: Path) -> None:
    """Throughput, latency and a fresh process beside them, as figures and pictures."""
    few = ("--lane", "cpu", "--slots", "1", "--evaluations", "4", "--idle", "1", "--plain", "1")
    run("speed", *few, "--out", tmp_path)
    found = read(tmp_path / "speed.json")
    assert found["unexpected"] == 0
    assert found["slots"]["1"]["evaluations"] == found["slots"]["1"]["seen"]["evaluations"] == 4
    assert {path.name for path in tmp_path.glob("*.svg")} == {"speed.svg", "stages.svg"}


def test_builds(tmp_path: Path) -> None:
    """What compiling costs, at first and again, beside plain torch."""
    run("builds", "--backend", "cpp", "--count", "1", "--plain", "1", "--slots", "1", "--out", tmp_path / "found.json")
    found = read(tmp_path / "found.json")
    assert found["batch_seen"]["not_passed"] == found["cold_verdicts"]["not_passed"] == []


def test_real(tmp_path: Path) -> None:
    """Problems against themselves; one that was judged is not judged again."""
    folder = ROOT / "examples" / "problems"
    arguments = (folder, "--only", r"(gelu|softmax)\.py", "--lane", "cpu", "--slots", "1", "--out", tmp_path)
    for _ in range(2):  # its status also says whether the host is quiet enough
        assert "2 of 2 passed at their first attempt" in run("real", *arguments, statuses=(0, 1))
    assert len((tmp_path / "real.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "real.svg").exists()


@pytest.mark.parametrize(
    ("name", "few"),
    [
        ("queueing", "--submissions 4 --queued 0,50 --judged 50 --no-fleet"),
        ("hosts", "--hosts 2 --slots 1 --rate 2 --busy 2 --seconds 3"),
        ("http_cost", "--waiters 4 --pairs 3 --connections 2 --seconds 1"),
    ],
)
def test_figures_are_written(tmp_path: Path, name: str, few: str) -> None:
    """Of queues, of two simulated hosts, and of what HTTP adds."""
    run(name, *few.split(), "--out", tmp_path / "found.json")
    assert read(tmp_path / "found.json")


def test_pages(tmp_path: Path) -> None:
    """How quick the page answers; a home that was filled is measured again as it is."""
    few = ("--evaluations", "1000", "--problems", "8", "--times", "2", "--out", tmp_path / "found.json")
    run("pages", *few, "--home", tmp_path / "home", "--page", "batch", "--busy", "1", "--rounds", "2")
    before = read(tmp_path / "found.json")
    assert [set(one["pages"]) for one in before["rounds"]] == [set(before["rounds"][0]["pages"])] * 2
    run("pages", *few, "--home", tmp_path / "home")
    found = read(tmp_path / "found.json")
    assert found["evaluations"] == before["evaluations"]
    assert set(found["rounds"][0]["pages"]) > set(before["rounds"][0]["pages"])


def test_figures_are_printed() -> None:
    """Of the end of a task, and of a wrong kernel of the gallery that is made small."""
    assert run("respawn", "--tasks", "10")
    assert "bad/nan" in run("autopsy", "--only", "bad/nan", "--budget", "20")
