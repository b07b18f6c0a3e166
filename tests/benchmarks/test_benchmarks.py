"""Benchmarks that need no GPU, each in its smallest size, without a check of their figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Time limit in seconds of programs that take minutes, with a margin for a busy host.
LIMIT_S = 600
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(LIMIT_S + 60)]


def run(name: str, *arguments: str | Path, statuses: tuple[int, ...] = (0,)) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode in statuses, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(
    ("name", "few"),
    [
        ("speed", "--lane cpu --slots 1 --evaluations 4 --idle 1 --plain 1"),
        ("serial", "--lane cpu --at-once 1,2 --seconds 0.1 --only fork,sealed_process"),
        ("builds", "--backend cpp --count 1 --plain 1 --slots 1"),
        ("queueing", "--submissions 4 --queued 0,50 --judged 50 --no-fleet"),
        ("hosts", "--hosts 2 --slots 1 --rate 2 --busy 2 --seconds 3"),
        ("dataset", "--evaluations 1000 --rows 300"),
        ("http_cost", "--waiters 4 --pairs 3 --connections 2 --seconds 1"),
    ],
)
def test_figures_are_written(tmp_path: Path, name: str, few: str) -> None:
    """Each benchmark writes its figures, speed also its pictures, and no evaluation ends unexpectedly."""
    run(name, *few.split(), "--out", tmp_path if name in ("speed", "serial") else tmp_path / "found.json")
    [figures] = tmp_path.glob("*.json")
    found = json.loads(figures.read_text())
    assert found
    assert not found.get("unexpected")
    assert not found.get("cold_verdicts", {}).get("not_passed")
    assert len([*tmp_path.glob("*.svg")]) == 2 * (name == "speed")


def test_the_host_s_memory_is_bounded() -> None:
    """A pair of 0.5 + 0.5 GiB takes at most 3 GiB of the host, over all processes."""
    assert "times the pair" in run("host_memory")


def test_real(tmp_path: Path) -> None:
    """Problems are judged against themselves, and a judged one is not judged again."""
    folder = ROOT / "examples" / "problems"
    arguments = (folder, "--only", r"(gelu|softmax)\.py", "--lane", "cpu", "--slots", "1", "--out", tmp_path)
    for _ in range(2):  # the status also reports whether the host is quiet enough
        assert "2 of 2 passed at their first attempt" in run("real", *arguments, statuses=(0, 1))
    assert len((tmp_path / "real.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "real.svg").exists()


def test_pages(tmp_path: Path) -> None:
    """The page's latency is measured, and a filled home is measured again unchanged."""
    few = ("--evaluations", "1000", "--problems", "8", "--times", "2", "--out", tmp_path / "found.json")
    counts = []
    for more in (["--page", "batch", "--busy", "1", "--rounds", "2"], ["--held", "--page", "runs"]):
        run("pages", *few, "--home", tmp_path / "home", *more)
        found = json.loads((tmp_path / "found.json").read_text())
        counts.append((found["evaluations"], len(found["rounds"])))
    assert counts[0] == (counts[1][0], 2)
