"""The examples of the integrations, run by their pages' commands."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kqueue.local.fleet import LocalFleet
from tests.packages import ADAPTERS_FOLDER, needs

pytestmark = pytest.mark.nightly

Run = Callable[..., subprocess.CompletedProcess[str]]


#: Commands of examples, and their output.
PRINTED = [
    (["modal_evaluator.py", "--gpu", "cpu"], ["good: correct=True runtime_ms=", "empty: no result: InvalidRequest: "]),
    (["local_evaluator.py"], ["compiled=True correctness=True"]),
    (["trace_guide.py"], ["CORRECT", "score 0\nFAILED: wrong_shape"]),
    (["agent.py"], ["+        return y * 2", ": syntax_error", ": runtime_error", ": passed"]),
    (["verl_reward.py"], ["right: reward 1.0", "wrong: reward 0.0", "no kernel: reward 0.0"]),
    (["kernelbench_eval.py"], ["row_sum.py: correctness=True runtime=", "correctness=False runtime=-1 ms wrong_shape"]),
    (["rewards.py"], ["rewards: [1.0, 0.0, 0.0]", "turn 1: reward 0.0, over False\nFAILED", "turn 2: reward 1.0"]),
]


@pytest.mark.parametrize(("words", "printed"), PRINTED, ids=[words[0] for words, _ in PRINTED])
def test_an_example(run_example: Run, words: list[str], printed: list[str]) -> None:
    """Each example runs by its page's command and prints each kernel's result."""
    done = run_example(*words)
    assert done.returncode == 0, done.stderr
    assert all(text in done.stdout for text in printed), done.stdout


def test_openevolves_evaluator(run_example: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenEvolve's evaluator scores both programs."""
    needs("openevolve")
    monkeypatch.setenv("PYTHONPATH", ADAPTERS_FOLDER)
    done = run_example("openevolve_evaluator.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].endswith(
        ": 0.0 FAILED: wrong_shape in the phase check: output 0 has shape (512, 1), not (512,)"
    )


def test_generations_of_the_gallery(run_example: Run, fleet: LocalFleet, tmp_path: Path) -> None:
    """The runner accepts the gallery in KernelBench's form."""
    done = run_example("make_generations.py", "out", "--lane", "cpu", "--most", "3")
    assert done.returncode == 0, done.stderr
    command = ["kernelbench", "--problems", "out/KernelBench", "--generations", "out/run", "--backend", "torch"]
    judged = run_example("-m", "kqueue", *command, "--checks", "1", "--calls", "5", "--json")
    assert judged.returncode == 0, judged.stderr
    found = json.loads(judged.stdout)
    assert (found["samples"], found["problems"], found["correct"]) == (3, 3, 3)
