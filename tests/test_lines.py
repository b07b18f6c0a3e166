"""Tests of the budgets of lines."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "scripts" / "lines.py"


def test_a_room_that_exceeds_its_budget_is_named(tmp_path: Path) -> None:
    """A folder counts without the rooms in it, budgets only fall, and a new folder needs a budget."""
    script, table = tmp_path / "scripts" / "lines.py", tmp_path / "scripts" / "lines.txt"

    def run(*options: str) -> tuple[int, str]:
        done = subprocess.run([sys.executable, script, *options], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    for name, lines in {"house/a.py": 2, "house/inner/b.py": 3, "house/inner/deep/c.py": 4}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass\n" * lines)
    script.parent.mkdir()
    shutil.copy(SCRIPT, script)
    table.write_text("house 2\nhouse/inner 9\nproduct 9\nscripts 999\n")
    assert run() == (0, "")
    assert run("--write") == (0, "")
    (tmp_path / "house" / "a.py").write_text("pass\n" * 3)
    assert run("--write") == (0, "")
    words = "{}: {} lines exceed the budget of {} in scripts/lines.txt\n"
    assert run() == (1, words.format("house", 3, 2) + words.format("product", 10, 9))
    (tmp_path / "shed").mkdir()
    (tmp_path / "shed" / "d.py").write_text("pass\n")
    assert words.format("shed", 1, 0) in run()[1]
