"""The examples of the integrations, as their pages tell to run them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_the_modal_like_evaluator(run_example: Run) -> None:
    """A batch with faults, each in its place."""
    done = run_example("modal_evaluator.py", "--gpu", "cpu")
    assert done.returncode == 0, done.stderr
    good, shape, no_kernel, empty = done.stdout.splitlines()
    assert good.startswith("good: correct=True runtime_ms=")
    assert shape.startswith("wrong shape: correct=False runtime_ms=None wrong_shape: ")
    assert "entry_point_missing" in no_kernel
    assert empty.startswith("empty: no result: InvalidRequest: kernel: ")


def test_the_local_evaluator(run_example: Run) -> None:
    """It uses the fleet that the settings name."""
    done = run_example("local_evaluator.py")
    assert done.returncode == 0, done.stderr
    assert "compiled=True correctness=True" in done.stdout
    assert "CORRECT" in done.stderr


def test_the_guide_for_trace(run_example: Run) -> None:
    """The reference as a kernel passes, another fails, each with its feedback."""
    done = run_example("trace_guide.py")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.strip().split("\n\n")
    assert "CORRECT" in first
    assert second.startswith("score 0\nFAILED: wrong_shape")


def test_rewards_and_turns(run_example: Run) -> None:
    """A batch's rewards, and an episode of two turns."""
    done = run_example("rewards.py")
    assert done.returncode == 0, done.stderr
    assert "rewards: [1.0, 0.0, 0.0]" in done.stdout
    assert "turn 1: reward 0.0, over False\nFAILED" in done.stdout
    assert "turn 2: reward 1.0, over True\nCORRECT" in done.stdout


def test_generations_of_the_gallery(run_example: Run, tmp_path: Path) -> None:
    """The gallery in KernelBench's form is what the runner takes."""
    done = run_example("make_generations.py", "out", "--lane", "cpu", "--most", "3")
    assert done.returncode == 0, done.stderr
    command = ["kernelbench", "--problems", "out/KernelBench", "--generations", "out/run", "--backend", "torch"]
    judged = subprocess.run(
        [sys.executable, "-m", "kqueue", *command, "--checks", "1", "--calls", "5", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert judged.returncode == 0, judged.stderr
    found = json.loads(judged.stdout)
    assert (found["samples"], found["problems"], found["correct"]) == (3, 3, 3)
