"""The kernels in proposers' answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kqueue.local.fleet import LocalFleet

pytestmark = pytest.mark.timeout(600)

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "search"


def test_a_search_says_what_it_took(live: LocalFleet, tmp_path: Path) -> None:
    """A proposal's feedback has the place of its kernel in the answer; a bare source needs none."""
    kernel = (EXAMPLE / "recorded" / "04_best.py").read_text()
    folder = tmp_path / "answers"
    folder.mkdir()
    (folder / "1.py").write_text(f"<think>```python\nclass ModelNew: 1\n```</think>Here: ```python\n{kernel}```")
    (folder / "2.py").write_text(kernel)

    def command(*arguments: object) -> str:
        return subprocess.run(
            [sys.executable, "-m", "kqueue", "search", *map(str, arguments)],
            cwd=tmp_path,
            env=os.environ | live.config.environment(),
            stdout=subprocess.PIPE,
            text=True,
            timeout=500,
            check=True,
        ).stdout

    command(
        *("--problem", EXAMPLE / "problem.py", "--recorded", folder, "--backend", "torch", "--gpu", "cpu"),
        *("--checks", 1, "--calls", 20, "--run-name", "answers", "--num-steps", 1, "--num-proposals", 2),
    )
    _, first, second = json.loads(command("show", "answers", "--json"))["proposals"]
    assert (first["category"], second["category"]) == ("passed", "passed")
    assert first["kernel"] == second["kernel"] == kernel
    assert "Taken from the answer: block 1 of 1 (python), lines 4-" in first["feedback"]
    assert "Taken from the answer" not in second["feedback"]
